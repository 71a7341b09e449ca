"""The step of a pipeline that represents those that were measured, gathered from its ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from determined_ds.pipe.recording import RecordedStep, recorded_step
from determined_ds.trial.instruction_times import pipeline_times


def record_passes(engines: Sequence[Any]) -> None:
    """Have a pipeline keep what it computes when; does nothing without one."""
    if (times := pipeline_times(engines)) is not None:
        times.record()


def median_step(engines: Sequence[Any], distributed: Any) -> RecordedStep | None:
    """The step of median length since :func:`record_passes`, of the first replica; a collective.

    Args:
        engines: Those that train.
        distributed: The ranks.

    Returns:
        The same on every rank; None without a pipeline, where no step was recorded, or where the pipeline lies on
        several machines, whose clocks differ.
    """
    if (times := pipeline_times(engines)) is None:
        return None
    steps = [step for step in times.recorded() if step]
    lengths = [step[-1].end - step[0].start for step in steps]
    gathered = distributed.allgather((times.stage, socket.gethostname(), lengths))
    rank_of: dict[int, int] = {}  # of each stage; slices of a stage run alike
    for rank in times.pipelines[0]:
        rank_of.setdefault(gathered[rank][0], rank)
    ranks = [rank_of[stage] for stage in sorted(rank_of)]
    longest = [max(each) for each in zip(*(gathered[rank][2] for rank in ranks), strict=False)]
    if not longest or len({gathered[rank][1] for rank in ranks}) > 1:
        return None
    chosen = sorted(range(len(longest)), key=longest.__getitem__)[(len(longest) - 1) // 2]
    spans = distributed.allgather(steps[chosen] if distributed.rank in ranks else [])
    return recorded_step(times.pipeline, [spans[rank] for rank in ranks])
