"""Traces of the ranks of a run -> one :class:`Profile`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from determined_ds.profile.host_parts import host_steps
from determined_ds.profile.phases import phases_of
from determined_ds.profile.step_parts import Profile, RankProfile
from determined_ds.profile.trace_file import Trace, read_trace


def analyse(paths: Sequence[Path]) -> Profile:
    """Read traces, each once.

    Args:
        paths: One of each rank; at least one.

    Raises:
        ConfigError: a file is not a trace of this library, or damaged.
    """
    ranks, first = [], None
    for path in paths:  # one at a time: a trace in memory takes twenty times its file
        trace = read_trace(path)
        ranks.append(of_rank(trace))
        first = first or trace.record
    assert first is not None
    return Profile(
        ranks=sorted(ranks, key=lambda rank: rank.rank),
        num_ranks=first.ranks,
        zero_stage=first.zero_stage,
        pipe_parallel_size=first.pipe_parallel_size,
        accumulation=first.accumulation,
        global_batch_size=first.global_batch_size,
        wait=first.wait,
        warmup=first.warmup,
        ds_config=first.ds_config or {},
    )


def of_rank(trace: Trace) -> RankProfile:
    """What the trace of a rank says."""
    record, phases = trace.record, phases_of(trace)
    return RankProfile(
        rank=record.rank,
        trace=trace.path.name,
        trace_bytes=trace.path.stat().st_size,
        host=record.host,
        device=record.device,
        device_name=record.device_name,
        pipe_stage=record.pipe_stage,
        steps=host_steps(trace, phases),
    )
