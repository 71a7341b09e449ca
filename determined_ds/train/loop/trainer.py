"""``Trainer``: Determined's ``deepspeed.Trainer`` by the same names, around this library's loop.

:meth:`Trainer.train` shows a whole step: take data, train, count, guard, do what is due, stop. Who takes the steps
otherwise, such as a script, calls :meth:`Trainer.begin_step`, :meth:`Trainer.take` and :meth:`Trainer.end_step`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from determined import core, pytorch, util
from torch.utils._pytree import tree_flatten

from determined_ds.checkpoints.engines import overrides
from determined_ds.checkpoints.files import TrialState, is_better, not_finite
from determined_ds.checkpoints.safe_load import check_callbacks
from determined_ds.checkpoints.storage import find_checkpoint
from determined_ds.checkpoints.writer import Checkpoints
from determined_ds.config.params import FitOptions, Length, read_model, skipped_ranges
from determined_ds.documents.document import Document
from determined_ds.documents.text import as_plain
from determined_ds.errors import CheckpointError, ConfigError, NotFiniteError, Problem, TrainingError
from determined_ds.report.live import RunState
from determined_ds.rundir.records import SKIPPED
from determined_ds.rundir.signals import HEART, TRAINED
from determined_ds.train.data.loaders import build_loader
from determined_ds.train.data.samples import METHOD, Skips, TrainingData
from determined_ds.train.data.seeds import seed_everything, set_rng_state
from determined_ds.train.data.streams import check_first_rows
from determined_ds.train.group.process_group import all_ranks_come, as_chief, gather_rows
from determined_ds.train.loop.metrics import MetricSums, Reducers, searched
from determined_ds.train.loop.reporting import Reporter
from determined_ds.train.loop.stopping import LENGTHS, NONE, VOTES, Due, LossGuard, Schedule, StopRequests
from determined_ds.train.loop.validation import Validator
from determined_ds.train.rank import cluster_info, run_here, training_begins
from determined_ds.trial import returned
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.pipeline_engine import seed_layers
from determined_ds.trial.returned import built_callbacks, failed, method_of, refused

logger = logging.getLogger("determined_ds")
METHODS = ("train_batch", "loss")
REPORTING_PERIOD = Length(unit="batches", value=100)  # Determined's default
# How long ranks wait for each other after an error; one without an error waits in a collective, and never comes.
AGREE_S = 10.0
# Kernels of a GPU may add the same numbers in a different order each time. In bf16 that is the last of three digits.
GPU_TOLERANCE = 0.01


class Trainer:
    """Trains a ``DeepSpeedTrial``.

    Args:
        trial: The trial, its engines wrapped.
        context: From :func:`determined_ds.open_context`.
    """

    schedule: Schedule  # once the data is open

    def __init__(self, trial: Any, context: Any) -> None:
        self.trial, self.context = trial, context

    def fit(
        self,
        checkpoint_period: pytorch.TrainUnit | timedelta | None = None,
        validation_period: pytorch.TrainUnit | None = None,
        max_length: pytorch.TrainUnit | None = None,
        reporting_period: pytorch.TrainUnit | None = pytorch.Batch(100),  # noqa: B008  (Determined's default)
        checkpoint_policy: str = "best",
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        *,
        stop_on_nan: bool = True,
        save_total_limit: int | None = None,
        warm_start: str = "weights",
        asynchronous_checkpoints: bool | None = None,
        fork: str | os.PathLike[str] | None = None,
        profile: Mapping[str, int] | None = None,
        on_out_of_memory: str = "shrink",
        on_spike: Mapping[str, Any] | None = None,
        skip_batches: Sequence[Any] | None = None,
    ) -> None:
        """Train. The arguments are those of ``determined.pytorch.deepspeed.Trainer.fit`` (0.38.1), and nine more.

        Args:
            checkpoint_period: ``Batch(n)`` or ``Epoch(n)`` from the start of training, or of a list of numbers; or a
                ``datetime.timedelta`` since the last checkpoint; None: only at the end.
            validation_period: The same, without a time.
            max_length: ``Batch(n)`` or ``Epoch(n)``, n >= 1: how much is trained.
            reporting_period: The same as ``validation_period``.
            checkpoint_policy: Validations followed by a checkpoint: ``best`` (``searcher.metric``), ``all``, ``none``.
            latest_checkpoint: Uuid of the checkpoint to resume from, of this run or Determined's trainer; or a folder.
            step_zero_validation: Validate before the first batch.
            test_mode: One batch trained, one validated, one checkpoint saved, loaded back, validated again.
            profiling_enabled: As ``profiling.enabled`` of the experiment; on a cluster.
            stop_on_nan: Stop at a loss, or a ``searcher.metric``, that is not finite, before it is saved.
            save_total_limit: Checkpoints to keep at most, >= 1, always with the best and the newest; None: all.
            warm_start: What is loaded of another trial's checkpoint: ``weights``, or ``all``: the optimizer too.
            asynchronous_checkpoints: Write checkpoints while training continues; None: where that is worth it.
            fork: Folder of a checkpoint of another run to start from; ignored with ``latest_checkpoint``.
            profile: Steps to record by torch's profiler: ``{"wait": 5, "warmup": 2, "active": 3}``; none with a test.
            on_out_of_memory: ``shrink``: start again with half the micro-batch and the same global batch; ``stop``.
            on_spike: At a loss or gradient norm that spikes, go back to a checkpoint and leave out the batches:
                ``{"window": 100, "deviations": 8, "skip": 20, "at_most": 3}``; None: never.
            skip_batches: Batches of the data, from 1, that are not trained on: ``[120, 139]``, or a list of such pairs.

        Raises:
            ConfigError: an argument is wrong.
            TrainingError: training failed.
        """
        given = dict(locals())
        stated = {name: given[name] for name in vars(FitOptions())}
        for name in LENGTHS:  # as hyperparameters state them; what is no unit is refused
            if isinstance(unit := given[name], timedelta):
                stated[name] = {"seconds": unit.total_seconds()}
            elif isinstance(unit, pytorch.TrainUnit):
                value = list(unit.value) if isinstance(unit.value, Iterable) else unit.value
                stated[name] = {"epochs" if isinstance(unit, pytorch.Epoch) else "batches": value}
        arguments = Document(name="Trainer.fit", data={"fit": as_plain(stated)})
        options, problems = read_model(FitOptions, arguments, ("fit",))
        if problems:
            raise ConfigError(problems)
        run = run_here()
        if run is not None:  # how to start is as det-ds run says, whatever the script does
            run.trained = True
            test_mode, latest_checkpoint, fork = test_mode or run.test, run.resume, run.fork
            if run.measurement is not None:
                from determined_ds.train.loop.measure import keep_row, measure_throughput

                row = measure_throughput(self.trial, self.context, **run.measurement._asdict())
                keep_row(run, row, is_chief=self.context.distributed.rank == 0, was_stopped=True)
                raise SystemExit(0)
        training = self.prepare(options, test_mode=test_mode)
        training.train(latest_checkpoint, None if fork is None else Path(fork))

    def prepare(
        self,
        fit: FitOptions,
        *,
        test_mode: bool = False,
        validator: Any = None,
        source: str = "",
        measuring: Any = None,
    ) -> Trainer:
        """Get ready to load and to take steps; enter ``closing`` before either.

        Args:
            fit: How; ``reporting_period`` None: never.
            test_mode: One batch is trained, and its checkpoint proved.
            validator: What validates, made when a checkpoint is to be loaded; the trial's own if None.
            source: The method that the training metrics come from, as messages name it; the trial's if "".
            measuring: What measures the steps, by ``begin_step()``, ``stop()`` once the work of a step is done, and
                ``end_step(batches_trained)``. Nothing is shown, validated or saved.
        """
        trial, context, info = self.trial, self.context, cluster_info()
        self.is_chief, self.is_stopped, self._test_mode = context.distributed.rank == 0, False, test_mode
        self.observers = [] if measuring is None else [measuring]
        self.validator, self._keeps = measuring or validator, measuring is None
        try:
            experiment = context.get_experiment_config()
        except ValueError:  # Determined's: no experiment configuration was given
            experiment = {}
        self._searcher = experiment.get("searcher") or {}
        self._metric = str(self._searcher.get("metric") or "") if self._keeps else ""
        self._smaller_is_better = self._searcher.get("smaller_is_better") is not False
        if test_mode:
            fit = replace(fit, max_length=Length(unit="batches", value=1), checkpoint_policy="none")
            fit = replace(fit, step_zero_validation=False, profile=None)
        elif fit.checkpoint_policy == "best" and not self._metric:
            fit = replace(fit, checkpoint_policy="all")
            if self.is_chief:
                missing = "checkpoint_policy best has no searcher.metric to go by"
                logger.warning("warning: %s: every validation is kept", missing)
        if fit.profiling_enabled or (experiment.get("profiling") or {}).get("enabled"):
            context._core.profiler.on()
        self.fit_options = fit
        self.reporter = Reporter(trial, context, shows=self.is_chief and self._keeps)
        self.state = TrialState(trial_id=info.trial.trial_id if info and info.task_type == "TRIAL" else 0)
        self.callbacks, hook = built_callbacks(trial, context), "on_step_end"
        steps = [getattr(each, hook, None) for each in self.callbacks.values()]
        if isinstance(trial, ReconciledTrial) and util.is_overridden(trial.on_step_end, ReconciledTrial):
            steps.insert(0, trial.on_step_end)
        self._hooks = [step for step in steps if callable(step)]
        self._of_step: dict[str, list[Any]] = {}  # metrics of the micro-batches of a step, for the hooks
        self.sums = MetricSums(context.device, source=source or method_of(trial, *METHODS))
        self.data = TrainingData()
        parts = {"metrics": self.sums, "reducers": Reducers(context), "data": self.data}
        self.spikes: Any = None
        if fit.on_spike and self._keeps:
            from determined_ds.train.loop.spikes import SpikeWatch

            self.spikes = parts["spikes"] = SpikeWatch(fit.on_spike, context.device)
        most, warm_start, note = fit.save_total_limit, fit.warm_start, self.reporter.note
        self.checkpoints = Checkpoints(
            trial, context, self.callbacks, parts, most, warm_start=warm_start, note=note
        )
        self._guard = LossGuard(context.device)
        self._stops = StopRequests(context, fit.checkpoint_period, self.checkpoints)
        self._generators: dict[str, Any] = {}
        self._best_at = -1  # batch of this process's best validation
        self._taken = 0  # micro-batches of this process
        # Whatever happens once it is entered, callbacks and display are ended.
        self.closing = contextlib.ExitStack()
        self.closing.callback(self.reporter.stop)
        self.began_at = 0  # the batch that this process goes on from
        training_begins(self if self._keeps and not test_mode else None)
        self.closing.callback(self.checkpoints.abandon)
        return self

    # ------------------------------------------------------------------------------------ a step

    def train(self, latest_checkpoint: str | None, fork: Path | None = None) -> None:
        """Train to the end of the schedule, or until a stop is requested; a collective. Arguments as of :meth:`fit`."""
        if self.fit_options.max_length is None:
            fix = "state it: fit(max_length=Batch(200)), or hyperparameters.fit.max_length: {batches: 200}"
            raise refused("fit.max_length", "missing: the length of training is required", fix, "max-length")
        # Under det-ds run its launcher has decided, or its user by --resume UUID.
        newest = Path(latest_checkpoint).name if latest_checkpoint and run_here() is None else None
        if newest is not None and (back := self.context.faults.goes_back(newest)) is not None:
            begun = self.context.resumed_from  # with another trial's checkpoint, on a cluster
            latest_checkpoint = back or (begun if begun != latest_checkpoint else None)
        if latest_checkpoint is not None:
            latest_checkpoint = find_checkpoint(self.context, latest_checkpoint)
        with self.closing:
            self.load(latest_checkpoint, fork)
            for model in self.context.models:
                model.train()
            batches, state, stops = self.begin(), self.state, self._stops
            if state.last_validation != state.batches_trained == self.schedule.num_batches:
                self._validate()  # it failed at the end of an earlier process
            if not self._test_mode:  # a task may have been preempted while it started
                stops.ask(state.batches_trained)
                stops.start(state.batches_trained)
                if stops.requested:
                    self._stop()
            counted = None if batches is None else self._counted(batches)
            while self.goes_on:
                self.begin_step()
                for metrics in self._train_batch(counted):
                    self.take(metrics)
                self.end_step()
            self.end()

    @property
    def goes_on(self) -> bool:
        """Whether there is another batch to train: neither is the schedule at its end, nor was a stop requested."""
        return not self.is_stopped and self.state.batches_trained < self.schedule.num_batches

    def begin_step(self) -> None:
        """A batch is about to be trained."""
        for each in self.observers:
            each.begin_step()
        index = self.context._current_batch_idx = self.state.batches_trained
        epoch, is_first, _ = self.schedule.epoch_of(index)
        if is_first:
            self._call_back("on_training_epoch_start", epoch)
        self.reporter.batch_begins()
        if self.spikes is not None:
            self.spikes.begin(*self.sums.running("loss"))
        self.context._loss_ids = {}

    def take(self, metrics: dict[str, Any]) -> None:
        """Add the training metrics of a micro-batch."""
        self.sums.add(metrics)
        for name, value in metrics.items() if self._hooks else ():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self._of_step.setdefault(name, []).append(value)

    def end_step(self, also: Callable[[Due], Due] | None = None) -> None:
        """Count a trained batch, do what is due, and stop where that is requested; a collective where something is.

        Args:
            also: What is due, given what the schedule says; called once the batch is counted.
        """
        state, stops = self.state, self._stops
        epoch, _, is_last = self.schedule.epoch_of(state.batches_trained)
        state.batches_trained = done = state.batches_trained + 1
        # Once a batch: a loss that is not finite stays in the sum that it was added to.
        self._guard.look(self.sums.running("loss")[0], done)
        if self.spikes is not None:
            self._watch_spikes()
        TRAINED.set()
        if self.context.profiler is not None:
            self.context.profiler.step()
        if is_last:
            state.epochs_trained = epoch + 1
            self._call_back("on_training_epoch_end", epoch)
        if self._hooks:  # nothing is read from a device
            mean = {name: sum(each[1:], each[0]) / len(each) for name, each in self._of_step.items()}
            self._of_step = {}
            for hook in self._hooks:
                hook(done - 1, mean)
        self.reporter.step(done)
        HEART.step(done)
        for each in self.observers:
            each.stop()
        for each in self.observers:
            each.end_step(done)
        due = self.schedule.due(done) if also is None else also(self.schedule.due(done))
        if due:
            self.do(due)
        if due.end:
            return
        if done >= stops.next_batch:
            self._ask()
        if stops.checkpoint_due:
            self.do(Due(checkpoint=True))
        if stops.requested:
            self._stop()

    def do(self, due: Due) -> None:
        """Do what is due after a batch; a collective."""
        state, done, stops = self.state, self.state.batches_trained, self._stops
        self._check_frozen()
        if due.report:
            seen = () if self.spikes is None else (self.spikes.rows(),)
            metrics, rows = self.reporter.reduce(self.sums, self._guard.first_bad(), stops.vote(done), *seen)
            self._check_spikes([row[1 + VOTES :] for row in rows])
            self._check_loss([row[0] for row in rows])
            stops.count([row[1 : 1 + VOTES] for row in rows], done)
            metrics["batches"] = done
            self._call_back("on_training_workload_end", avg_metrics=metrics, batch_metrics=[])
            self.context.reset_reducers()
            share = 1.0 if due.end else min(1.0, done / self.schedule.num_batches)
            self.reporter.training(done, metrics, progress=share)
            self._seal_written()
        elif due.validate or due.checkpoint:
            if self.spikes is not None:
                self._check_spikes(gather_rows(self.spikes.rows().reshape(-1)).tolist())
            self._check_loss(self.context.distributed.allgather(float(self._guard.first_bad())))
            self.reporter.pause()
        if due.validate and self._keeps and state.last_validation != done:
            try:
                is_worth_it = self._validate()
            except NotFiniteError:
                raise
            except Exception:
                self._save_before_error()
                raise
            if is_worth_it:
                self.checkpoint(waits=due.end)
        if due.checkpoint:
            self.checkpoint(waits=due.end)
        if due.validate or due.checkpoint:
            self.reporter.status("training")
            self.reporter.upload()
            if not due.end:  # they may have taken long
                self._ask()

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._taken += 1
            yield batch

    def _train_batch(self, batches: Iterator[Any] | None) -> list[dict[str, Any]]:
        """One optimizer step: ``train_batch``, as often as it takes. Returns the metrics that this rank has."""
        context, trial, found = self.context, self.trial, list[dict[str, Any]]()
        index, accumulation = self.state.batches_trained, context.get_num_micro_batches_per_slot()
        epoch, before = self.schedule.epoch_of(index)[0], self._taken
        # A pipeline's engine, and an author who accumulates, take all micro-batches of a step in one call.
        is_pipeline, is_manual = context.use_pipeline_parallel, context._manual_grad_accumulation
        for _ in range(1 if is_pipeline or is_manual else accumulation):
            metrics = trial.train_batch(batches, epoch, index)
            HEART.beat()
            if context._mpu.should_report_metrics:
                metrics = returned.metrics(trial, metrics, *METHODS)
                # Source: ``make_metrics`` in determined 0.38.1's ``util.py`` leaves None out of the mean, too.
                found.append({name: value for name, value in metrics.items() if value is not None})
        taken, did, fix = self._taken - before, "", ""
        if batches is not None and not is_pipeline and (not taken if is_manual else taken != accumulation):
            did = f"took {taken or 'no'} batch{'es' * (taken > 1)} from its iterator"
            fix = "call next(dataloader_iter) once; to take all micro-batches of a step in one call, "
            fix += "context.disable_auto_grad_accumulation()"
        elif is_manual and not is_pipeline and (rest := context.models[0].micro_steps % accumulation):
            did = f"stopped after {rest} of {accumulation} micro-batches"
            fix = "call engine.step() once for each of them, or leave out context.disable_auto_grad_accumulation()"
        elif self._steps_before == [engine.global_steps for engine in context.models]:
            did = "trained nothing: no engine made a step"
            fix = "call engine.backward(loss) and engine.step()"
        if did:
            raise failed(trial, METHODS[0], None, f"{accumulation} in a step, one a call", fix, did=did)
        return found

    def _check_frozen(self) -> None:
        """Refuse a parameter that was frozen or unfrozen since training began, where the engine would not follow.

        Under ZeRO 1 to 3 a parameter that is frozen later still moves, by the momentum and the weight decay of the flat
        partition that it is in, and one that is unfrozen never trains (measured, AdamW, deepspeed 0.19.8). torch's own
        optimizer leaves out a parameter without a gradient, and one that is in none of its groups.
        """
        for engine, name, each, was_on in self._built:
            if each.requires_grad == was_on:
                continue
            is_torchs = isinstance(engine.optimizer, torch.optim.Optimizer)
            groups = engine.optimizer.param_groups if is_torchs else ()
            if not any(each is own for group in groups for own in group["params"]):
                raise TrainingError(
                    f"{name} was {'frozen' if was_on else 'unfrozen'} in training, and the engine does not follow\n"
                    "  fix: let it require a gradient in build_model, put it into a group of its own in "
                    "build_parameters, and give that group a rate of 0 for these steps: LambdaLR in build_scheduler"
                )

    def _stop(self) -> None:
        """Stop as requested, with a checkpoint where something is trained; a collective."""
        self.is_stopped = True
        done, total = self.state.batches_trained, self.schedule.stated_batches
        if done:
            self.do(Due(checkpoint=True, end=True))
        reason = getattr(self.context._core.preempt, "reason", "") or "as requested"
        self.reporter.note(f"stopped     batch {done}{f' of {total}' if total else ''}, {reason}")

    def _ask(self) -> None:
        self._stops.ask(self.state.batches_trained)
        self._seal_written()

    def _call_back(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks.values():
            getattr(callback, hook)(*args, **kwargs)

    # ------------------------------------------------------------------------------------ report, validate

    def _watch_spikes(self) -> None:
        assert self.spikes is not None
        engine, (loss, weight) = self.context.models[0], self.sums.running("loss")
        if loss is None and self.context._mpu.should_report_metrics:
            fix = "report the metric that is to be watched as loss, or leave out fit.on_spike"
            raise refused("fit.on_spike", "the trial reports no metric loss", fix, "spike-loss")
        # In fp16 the loss scale makes norms that are not finite, and leaves out their steps.
        norm = None if engine.fp16_enabled() else engine.get_global_grad_norm()
        self.spikes.end(loss, weight, norm)

    def _check_spikes(self, ranks: list[list[float]]) -> None:
        """Before the weights are used: take a step back whose loss or gradient norm spikes."""
        if self.spikes is not None and (spike := self.spikes.judge(ranks, self.state.batches_trained)):
            from determined_ds.train.recovering import take_back

            take_back(self, spike)

    def _check_loss(self, first_bad: list[float]) -> None:
        """Before the weights are used: stop where a loss of a rank was not finite, first at these batches."""
        first = min((batch for batch in first_bad if batch != NONE), default=NONE)
        if first != NONE and self.fit_options.stop_on_nan:
            at = [str(rank) for rank, batch in enumerate(first_bad) if batch == first]
            ranks = f"rank{'s' * (len(at) > 1)} {', '.join(at)}"
            advice = (
                "Lower the learning rate, warm up longer, clip gradients, or check the data of this batch"
            )
            self._end_not_finite(f"the loss was not finite at batch {first:.0f}, on {ranks}", advice)

    def _end_not_finite(self, said: str, advice: str) -> NoReturn:
        self.checkpoints.finish()  # its weights are good
        kept = self.state.kept
        found = f"the last good checkpoint is {kept[-1]}" if kept else "no checkpoint was made yet"
        raise NotFiniteError(f"{said}: {found}. {advice}; fit.stop_on_nan: false continues regardless")

    def _validate(self) -> bool:
        """Validate and report; a collective. Returns whether a checkpoint is due for it."""
        state, name = self.state, self._metric
        self.reporter.status("validating")
        metrics = self.validator.run(list(self.callbacks.values()))
        batch = state.last_validation = state.batches_trained
        position = {"batches": batch}
        # Only where something is counted in them: ``epochs``, though always 0, would be the web UI's first chart.
        if self.schedule.in_epochs or self._searcher.get("time_metric") == "epochs":
            position["epochs"] = state.epochs_trained

        def judged() -> bool:  # only the chief knows what was best before
            best, is_less = self.reporter.validation(batch, position | metrics), self._smaller_is_better
            return bool(name) and is_better(searched(metrics, name), best, smaller_is_better=is_less)

        better = as_chief(self.context.distributed, judged)
        if found := not_finite(metrics):  # stop before the weights are saved, the same on all ranks
            said = f"{', '.join(found)} was not finite in the validation at batch {batch}"
            if self.fit_options.stop_on_nan and name in found:
                advice = f"Lower the learning rate, or check the validation data and how {name} is computed"
                self._end_not_finite(said, advice)
            if self.is_chief:
                logger.warning("warning: %s; check how the trial computes it", said)
        if better:
            self._best_at = batch
        policy = self.fit_options.checkpoint_policy
        return (better if policy == "best" else policy == "all") and batch > 0

    # ------------------------------------------------------------------------------------ checkpoints

    def checkpoint(self, *, waits: bool) -> None:
        """Write a checkpoint, where there is none of this batch; a collective."""
        state = self.state
        if not self._keeps:
            return
        if state.last_checkpoint == state.batches_trained:
            if waits:
                self.checkpoints.finish()
            return
        self.reporter.status("checkpointing")
        state.skipped = self.skips.passed(state.batches_trained)
        best = self._best_at == state.batches_trained
        self.checkpoints.save(state, best=best, waits=waits and not self._test_mode)
        self._stops.saved_s = time.monotonic()
        self.reporter.checkpoints(state.last_checkpoint, self.checkpoints.batch_in_writing)

    def _left_out(self, batches: tuple[int, int], batches_trained: int) -> None:
        """Batches of the data are left out: say it, and record which samples they have."""
        words, samples = f"batches {batches[0]} to {batches[1]} of the data", self.data.samples
        self.reporter.note(f"left out    {words}, after batch {batches_trained}")
        if self.is_chief and self._keeps:
            metrics: dict[str, Any] = {"skipped_first": batches[0], "skipped_last": batches[1]}
            metrics |= {"skipped_samples": samples(*batches)} if samples is not None else {}
            self.context._core.train.report_metrics(SKIPPED, batches_trained, metrics)

    def _seal_written(self) -> None:
        """Complete a checkpoint that was written meanwhile, if the last vote says that all ranks have."""
        if self._stops.is_written:
            self._stops.is_written = False
            self.reporter.pause()
            self.checkpoints.finish()
            self.reporter.checkpoints(self.state.last_checkpoint, None)

    def _save_before_error(self) -> None:
        """Write a checkpoint before an error is raised, where all ranks have one and so can take part in it."""
        if all_ranks_come(f"error/{self.state.batches_trained}", within_s=AGREE_S):
            try:
                self.checkpoint(waits=True)
                self.checkpoints.finish()
            except Exception as error:
                if self.is_chief:
                    logger.warning("warning: no checkpoint was written before it: %s", error)

    # ------------------------------------------------------------------------------------ start and end

    def load(
        self, latest_checkpoint: str | None, fork: Path | None = None, weights: str | None = None
    ) -> None:
        """Load the checkpoint, if there is one, or weights alone; a collective. Arguments as of :meth:`train`."""
        context, begins_with = self.context, latest_checkpoint or fork or weights
        for callback in self.callbacks.values():
            name = Path(begins_with).name if begins_with else None
            callback.on_trial_startup(context.get_initial_batch(), name)
            self.closing.callback(callback.on_trial_shutdown)
        if self.validator is None:
            self.validator = Validator(self.trial, context, self.reporter.note, test_mode=self._test_mode)
        context.reset_reducers()
        if latest_checkpoint is not None:
            self.read(latest_checkpoint)
        elif fork is not None:
            self.checkpoints.fork(fork)
        elif weights is not None:
            self.state.batches_trained = self.checkpoints.take(weights).batches_trained

    def read(self, uuid: str) -> None:
        """Load a checkpoint of this run, or its own trial's; a collective."""
        self.state, self._generators = self.checkpoints.load(uuid, trial_id=self.state.trial_id)

    def begin(self) -> Any:
        """Do all that comes before the first batch; a collective. Returns the micro-batches, None on ranks without."""
        context, mpu, data, note = self.context, self.context._mpu, self.data, self.reporter.note
        fit, seed, done = self.fit_options, context.get_trial_seed(), self.state.batches_trained
        self.began_at = done
        if self.is_chief and context.faults.all and cluster_info() is not None:
            from determined_ds.cluster.core_context import record_on_master

            record_on_master(
                context._core, context.faults, done
            )  # again: it archives those of earlier starts
        stated = skipped_ranges([*map(list, (*skipped_ranges(fit.skip_batches or ()), *context.faults.skip))])
        self.skips = Skips(stated, self.state.skipped, done)
        if mpu.should_build_data_loader:
            loader = build_loader(self.trial, context, METHOD, note)
            dataset = getattr(loader, "dataset", None)
            if dataset is getattr(self.validator, "dataset", None) and hasattr(dataset, "state_dict"):
                message = "is trained and validated on, and keeps one position: a validation would move it"
                key, fix = type(dataset).__name__, "build the dataset twice, once for each"
                raise ConfigError(Problem(key=key, message=message, fix=fix, code="stream-shared"))
            batch, replica, start = context.resolved.batch, mpu.data_parallel_rank, self.skips.taken(done)
            data.open(loader, note, batch=batch, replica=replica, seed=seed, start_batch=start)
            if self.skips.ranges and data.batches is not None:
                data.batches = self.skips.discarding(data.batches, batch.accumulation, done, self._left_out)
        here = None if data.batches is None else (data.batches_per_epoch, data.first, data.inexact)
        loading = [rank for rank in context.distributed.allgather(here) if rank is not None]
        check_first_rows([first for _, first, _ in loading], note)
        lengths = [length for length, _, _ in loading]
        inexact = next((words for *_, words in loading if words), "")
        if overrides(self.trial, "load"):
            inexact = f"{type(self.trial).__name__} has a load of its own"
        if self.spikes is not None and inexact:
            message = f"{inexact}, so the run would not go back exactly to where it was"
            fix = "leave it out, or give the data state_dict and load_state_dict"
            raise refused("fit.on_spike", message, fix, "spike-inexact")
        per_epoch = None if None in lengths else min(lengths)
        context._epoch_len = per_epoch or sys.maxsize  # for Determined's is_epoch_start() and similar methods
        self.schedule = Schedule(fit, per_epoch)
        context.adopt()
        total, metric, is_less = self.schedule.stated_batches, self._metric, self._smaller_is_better
        state = RunState(metric=metric, smaller_is_better=is_less, total=total, batch=done)
        self.reporter.start(state)
        self._call_back("on_training_start")
        check_callbacks(self.callbacks)
        self.checkpoints.prepare(fit.asynchronous_checkpoints)
        if fit.step_zero_validation and done == 0:
            self._validate()
        # Nothing is built from here on: random numbers continue from where the checkpoint was made, or begin.
        if self._generators:
            set_rng_state(self._generators, context.device)
        else:  # ranks began alike, to build the same model; the dropout of replicas and of slices differs
            size = context.resolved.topology.sequence_parallel_size
            slices_before = context.distributed.rank % size * mpu.data_parallel_world_size
            seed_everything(seed + mpu.data_parallel_rank + slices_before)
        seed_layers(context.models, seed, mpu.data_parallel_rank)
        self._steps_before = [engine.global_steps for engine in context.models]
        self._built = [
            (engine, name, each, each.requires_grad)
            for engine in context.models
            for name, each in engine.module.named_parameters()
        ]
        self.closing.enter_context(context.profiler or contextlib.nullcontext())
        self.reporter.status("training")
        self._stops.start(done)
        if fit.profile is None:
            return data.batches
        from determined_ds.logs.tensorboard import uploaded_to
        from determined_ds.profile.capture import Capture
        from determined_ds.report.results import PROFILE_DIR

        kept_in, parent = "", Path(context._run_dir.path)
        if not isinstance(context._core.train, core.DummyTrainContext):  # beside the files that are uploaded
            parent = Path(context._core.train.get_tensorboard_path())
            kept_in = f"{uploaded_to(cluster_info())}/{PROFILE_DIR}"
        capture = Capture(fit.profile, context, folder=parent / PROFILE_DIR, note=note, kept_in=kept_in)
        self.closing.callback(capture.close)
        self.observers.append(capture)
        return None if data.batches is None else capture.data(data.batches)

    def end(self, validate: Callable[[], Any] | None = None) -> None:
        """What comes after the last batch; a collective. A test validates by ``validate``, if given."""
        self.checkpoints.finish()
        if self._test_mode:
            proof, words = validate, "saved, loaded back, weights that add up to"
            if proof is None:
                proof, words = lambda: self.validator.run([]), "validated, saved, loaded back, validated to"
            same = prove_checkpoint(self.context, proof, lambda: self.read(self.state.kept[-1]))
            self.reporter.note(f"test passed: trained, {words} {same}")
        elif self.is_chief and not self.is_stopped and self.context.faults.all and cluster_info() is not None:
            from determined_ds.train.recovering import report_goodput

            report_goodput(self)
        training_begins(None)
        HEART.rest()

    def evaluate(self, checkpoint: str) -> None:
        """``det-ds run --evaluate``: validate the weights of a checkpoint once, and report; a collective."""
        with self.closing:
            self.load(None, weights=checkpoint)
            self.context.adopt()
            batches = self.state.batches_trained
            metrics = {"batches": batches, **self.validator.run(list(self.callbacks.values()))}
            if self.is_chief:
                self.reporter.validation(batches, metrics)
            self.reporter.upload()


def of_hyperparameters(fit: FitOptions) -> FitOptions:
    """``hyperparameters.fit``, where a reporting period that is not stated is Determined's."""
    return replace(fit, reporting_period=fit.reporting_period or REPORTING_PERIOD)


def prove_checkpoint(context: Any, validate: Callable[[], Any], load: Callable[[], Any]) -> str:
    """The proof of ``--test``: scramble the weights, load the checkpoint back, validate to the same; a collective."""
    before = validate()
    for model in context.models:  # with NaN, so that only a load that restores all weights leads to a number
        for parameter in model.module.parameters():
            # Under ZeRO 3 a parameter is a placeholder; its partition on this rank is ``ds_tensor``.
            getattr(parameter, "ds_tensor", parameter).data.fill_(math.nan)
    load()
    after = validate()
    tolerance = GPU_TOLERANCE if context.device.type == "cuda" else 0.0

    def is_same(each: Any, then: Any) -> bool:
        are_floats = isinstance(each, float) and isinstance(then, float)
        return each == then or (are_floats and math.isclose(each, then, rel_tol=tolerance))

    (left, shape), (right, other) = tree_flatten(before), tree_flatten(after)
    if shape != other or not all(map(is_same, left, right)):
        raise CheckpointError(f"validated {before} before the checkpoint and {after} after loading it back")
    return f"the same number within {GPU_TOLERANCE:.1%}" if tolerance else "the same number"
