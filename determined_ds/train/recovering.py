"""What a rank records of a fault before it ends, for its next start; see :mod:`determined_ds.rundir.recoveries`."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch

from determined_ds.config.strategy import Strategy
from determined_ds.errors import NotFiniteError, SpikeError
from determined_ds.rundir.handed_on import shortened
from determined_ds.rundir.records import OUT_OF_MEMORY, SPIKE, Fault, Faults, record_fault
from determined_ds.rundir.recoveries import goodput, in_words
from determined_ds.train.group.process_group import as_chief
from determined_ds.train.loop.spikes import Spike
from determined_ds.train.rank import cluster_info

logger = logging.getLogger("determined_ds")


def _record(training: Any, fault: Fault, next_batch: int | None = None) -> None:
    """Record a fault, after which the next start goes back to a batch; None: it goes on from the last checkpoint."""
    context = training.context
    if cluster_info() is None:
        record_fault(context._run_dir.recoveries, fault)
        return
    from determined_ds.cluster.core_context import record_on_master

    faults = Faults((*context.faults.all, fault))
    numbers = {
        "recoveries": len(faults.all),
        "recovery_fault_at_batch": fault.batch,
        "recovery_spikes": faults.spikes,
    }
    numbers |= {"recovery_micro_batch_too_large": faults.too_large} if faults.too_large else {}
    batch = training.began_at if next_batch is None else min(next_batch, training.began_at)
    record_on_master(context._core, faults, batch, **numbers)


def report_goodput(training: Any) -> None:
    """The share of a trial's time that was training that counted, as a metric; once it is trained, on the chief."""
    from determined.experimental import Trial

    from determined_ds.cluster.core_context import record_on_master
    from determined_ds.cluster.trials import recorded

    context = training.context
    core = context._core
    try:
        share = goodput(recorded(Trial(trial_id=core.info.trial.trial_id, session=core._session)))
        if share is not None:
            record_on_master(core, context.faults, training.state.batches_trained, goodput=share)
    except Exception as error:  # it was trained all the same
        logger.warning("warning: goodput is not reported to the master: %s", error)


# ------------------------------------------------------------------------------------------- out of memory


def after_out_of_memory(training: Any, reason: str) -> tuple[bool, str]:
    """This rank has run out of the accelerator's memory while it trained.

    Returns:
        Whether the next start goes on with smaller micro-batches, and what to say of it.
    """
    context, state = training.context, training.state
    batch, stops = context.resolved.batch, training.fit_options.on_out_of_memory == "stop"
    size = batch.micro_batch_size
    cannot = {
        f"fit.on_out_of_memory: stop; shrink would halve micro-batches of {size}": stops,
        "the code states the batch sizes, so write a smaller micro-batch there": context.decided_before
        is None,
        "micro-batches are of one sample already": size == 1,
    }
    if why := next((words for words, holds in cannot.items() if holds), ""):
        return False, f"{why}\n  fix: {_advice(context)}"
    fault = Fault(
        cause=OUT_OF_MEMORY, reason=shortened(reason), batch=state.batches_trained, micro_batch_size=size
    )
    _record(training, fault)
    words = (
        f"micro-batches of {size} do not fit: the next start takes at most {size // 2}, and accumulates more,"
    )
    advice = (
        f"so that a step keeps its {batch.global_batch_size} samples\n  to keep the speed: {_advice(context)}"
    )
    return True, f"{words} {advice}"


def _advice(context: Any) -> str:
    """The next strategy that holds less, by estimate, and what it costs."""
    from determined_ds.memory.fitting import Fit, alternatives  # only now: a rank loads little
    from determined_ds.memory.model import shape_from_sizes
    from determined_ds.memory.rank import memory_per_rank
    from determined_ds.memory.units import format_bytes

    strategy: Strategy = context.resolved.strategy
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in context.models[0].module.parameters())
    parameters *= strategy.pipe_parallel_size * strategy.model_parallel_size
    shape = shape_from_sizes(num_parameters=parameters)
    cuda = context.device.type == "cuda"
    gpu = torch.cuda.get_device_properties(context.device).total_memory if cuda else None
    now = memory_per_rank(shape, strategy).model_states_bytes

    def divides(form: Strategy) -> int:
        return form.zero_stage + bool(form.offload_optimizer) + bool(form.offload_param)

    further = [each for each in alternatives(strategy) if divides(each) > divides(strategy)]
    fits = [Fit(shape=shape, strategy=each, gpu_memory_bytes=gpu) for each in further]
    less = [each for each in fits if each.memory.model_states_bytes < 0.95 * now]
    if not less:
        return "use more slots, activation checkpointing or shorter samples: no stage or offload holds less"
    found = next((each for each in less if each.fits is not False), less[-1])
    form, cost = found.strategy, "at the same communication"
    if form.zero_stage == 3 and strategy.zero_stage < 3:
        cost = "for half as much communication again"
    wanted = f"--set hyperparameters.zero_stage={form.zero_stage}"
    for part in ("offload_optimizer", "offload_param"):
        if getattr(form, part) and not getattr(strategy, part):
            cost = "for copies to and from host memory at each step"
            wanted += f" --set hyperparameters.overwrite_deepspeed_args.zero_optimization.{part}.device=cpu"
    holds = f"{format_bytes(found.memory.model_states_bytes)} of model states a rank in place of {format_bytes(now)}"
    return f"{form.name} holds {holds} by estimate, {cost}: {wanted}"


# ------------------------------------------------------------------------------------------- spikes


def take_back(training: Any, spike: Spike) -> NoReturn:
    """A step has spiked: record where to go back to, and what is left out; a collective.

    Raises:
        SpikeError: it is recorded.
        NotFiniteError: as many spikes as may be were taken back already.
    """
    context, options, faults = training.context, training.fit_options.on_spike, training.context.faults
    training.checkpoints.finish()
    if faults.spikes >= options.at_most:
        before = f"{faults.spikes} spikes were taken back already (fit.on_spike.at_most), without batches"
        raise NotFiniteError(
            f"{spike.said} at batch {spike.batch}: {before} {in_words(faults.skip) or 'left out'}\n"
            "  fix: lower the learning rate, warm up longer, clip gradients, or look at these batches"
        )
    ranges = training.skips.around(spike.batch, options.skip)
    limit = max(0, spike.batch - 1 - max(options.window, options.skip // 2))
    kept = training.state.kept

    def recorded() -> str:
        back_to, where, steps = "", "the start", 0
        for uuid in reversed(kept):
            at = context._core.checkpoint.get_metadata(uuid).get("steps_completed", limit + 1)
            if at <= limit:
                back_to, where, steps = uuid, f"checkpoint {uuid} of batch {at}", at
                break
        fault = Fault(
            cause=SPIKE,
            reason=f"{spike.said} at batch {spike.batch}",
            batch=training.state.batches_trained,
            skip=tuple(ranges),
            back_to=back_to,
            newest=kept[-1] if kept else "",
        )
        _record(training, fault, steps)
        return where

    where = as_chief(context.distributed, recorded)
    left_out = in_words(sorted({*ranges} - {*training.skips.ranges}))
    goes = f"the next start goes back to {where}, and leaves out batches {left_out} of the data"
    raise SpikeError(f"{spike.said} at batch {spike.batch}: {goes}")
