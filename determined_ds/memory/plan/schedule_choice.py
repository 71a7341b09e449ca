"""The order in which the stages of a planned pipeline compute: the one in which they wait least, of those that fit.

The way of a choice::

    schedules x chunks -> those that the micro-batches and the layers make -> that rules accept -> that fit -> the
    shortest step by its bubble, unless a simpler one is nearly as short
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import reconcile
from determined_ds.config.strategy import Strategy
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from determined_ds.memory import fits, format_bytes, memory_per_rank
from determined_ds.memory.plan.chosen_json import deepspeed_json
from determined_ds.memory.plan.needs import PlanRequest
from determined_ds.pipe.orders import DUALPIPEV, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from determined_ds.pipe.partition import MEASURED

# (schedule, chunks), the simplest first. gpipe takes as long as 1f1b, and holds more.
ORDERS = ((ONE_F_ONE_B, 1), (ZB_H1, 1), (INTERLEAVED, 2), (DUALPIPEV, 2), (INTERLEAVED, 4))
# Of the optimizer and its schedule, which have no say here.
FILLED = {"learning_rate": 1e-4, "weight_decay": 0.0, "warmup_num_steps": 1}
BOOKKEEPING = 0.05  # of a step, that a schedule may take beyond 1F1B for the same work


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A schedule that was not chosen.

    Args:
        strategy: With it.
        fits: Whether a rank has the memory.
    """

    strategy: Strategy
    fits: bool


def with_schedule(needs: PlanRequest, strategy: Strategy) -> tuple[Strategy, list[Rejected]]:
    """A pipeline with the schedule that keeps its stages busiest, and the others that it could have.

    Args:
        needs: What is planned for.
        strategy: That fits, its micro-batches decided; under 1F1B.
    """
    if strategy.pipe_parallel_size == 1 or needs.is_script:
        return strategy, []
    strategy = replace(strategy, partition_method=MEASURED)
    best, others = strategy, []
    for tried in _orders(needs, strategy):
        has_room = fits(needs.shape, tried, needs.gpu_memory_bytes)
        if has_room and (1 - tried.bubble) > (1 + BOOKKEEPING) * (1 - best.bubble):
            others.append(Rejected(strategy=best, fits=True))
            best = tried
        else:
            others.append(Rejected(strategy=tried, fits=has_room))
    return best, others


def _orders(needs: PlanRequest, strategy: Strategy) -> Iterator[Strategy]:
    """The strategy in other orders that can run."""
    for schedule, chunks in ORDERS[1:]:
        tried = replace(strategy, pipe_schedule=schedule, pipe_chunks=chunks)
        if (
            tried.pipeline.parts <= needs.shape.num_layers
            and not tried.pipeline.problem()
            and _runs(needs, tried)
        ):
            yield tried


def _runs(needs: PlanRequest, strategy: Strategy) -> bool:
    """Whether rules accept it."""
    point = {
        "global_batch_size": needs.global_batch_size,
        "pipe_parallel_size": strategy.pipe_parallel_size,
        "pipe_schedule": strategy.pipe_schedule,
        "pipe_chunks": strategy.pipe_chunks,
        "activation_checkpointing": strategy.activation_checkpointing,
        **FILLED,
    }
    ds = Document(name="the DeepSpeed JSON", data=deepspeed_json(needs, strategy))
    gpus = Accelerator(name="cuda", num_devices=needs.gpus, bf16=True, fp16=True)
    try:
        reconcile(Document(name="hyperparameters", data=point), ds, slots=needs.gpus, accelerator=gpus)
    except ConfigError:
        return False
    return True


def schedule_in_words(needs: PlanRequest, strategy: Strategy, others: list[Rejected]) -> tuple[str, str]:
    """The schedule of a planned pipeline, and why."""
    if needs.is_script:
        return strategy.pipe_schedule, "--entrypoint is a script, whose engine has this schedule"
    memory = format_bytes(memory_per_rank(needs.shape, strategy).total_bytes)
    reason = f"by count its stages wait {strategy.bubble:.0%} of the time, and a rank needs {memory}"
    for each in others:
        other = each.strategy
        room = "" if each.fits else ", and does not fit"
        needed = format_bytes(memory_per_rank(needs.shape, other).total_bytes)
        reason += f"; {_name(other)} {other.bubble:.0%} with {needed}{room}"
    if others:
        reason += f". A schedule that would gain less than {BOOKKEEPING:.0%} over a simpler one is not taken"
    return _name(strategy), reason


def _name(strategy: Strategy) -> str:
    chunks = f" with {strategy.pipe_chunks} chunks a rank" if strategy.pipe_chunks > 1 else ""
    return f"{strategy.pipe_schedule}{chunks}"


def partition_in_words(strategy: Strategy) -> tuple[str, str]:
    """How the layers of a planned pipeline are shared out, and why."""
    if strategy.partition_method is None:
        return "as the script has it", "--entrypoint is a script, which shares out its layers itself"
    return strategy.partition_method, (
        f"layers are timed once as the run starts, and shared out so that its {strategy.pipe_parallel_size} stages take"
        " equally long: a head or an embedding takes another share of the time than of the parameters"
    )
