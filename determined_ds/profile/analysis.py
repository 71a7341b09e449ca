"""Traces of the ranks of a run -> one :class:`Profile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from determined_ds.profile.arrivals import arrivals_of
from determined_ds.profile.causes import with_findings
from determined_ds.profile.device_parts import device_steps
from determined_ds.profile.host_parts import host_steps
from determined_ds.profile.memory_of_step import memory_of_step
from determined_ds.profile.nesting import operators_of
from determined_ds.profile.operators import operator_costs
from determined_ds.profile.phases import phases_of
from determined_ds.profile.step_parts import Profile, RankProfile
from determined_ds.profile.trace_file import Trace, read_trace
from determined_ds.profile.waiting_calls import waiting_calls_of

TOLERANCE = 0.02  # of a step, between its parts and the clock


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
    warnings = tuple(oddities(ranks, first.ranks))
    profile = Profile(
        ranks=sorted(ranks, key=lambda rank: rank.rank),
        num_ranks=first.ranks,
        zero_stage=first.zero_stage,
        pipe_parallel_size=first.pipe_parallel_size,
        pipe_schedule=first.pipe_schedule,
        pipe_chunks=first.pipe_chunks,
        accumulation=first.accumulation,
        global_batch_size=first.global_batch_size,
        wait=first.wait,
        warmup=first.warmup,
        ds_config=first.ds_config or {},
        warnings=warnings,
    )
    return with_findings(profile)


def oddities(ranks: Sequence[RankProfile], num_ranks: int) -> Iterator[str]:
    """What is missing or odd in traces, each a sentence."""
    missing = sorted(set(range(num_ranks)) - {rank.rank for rank in ranks})
    if missing:
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield f"the traces of {len(missing)} of {num_ranks} ranks are missing ({names}): means are over the others"
    for rank in ranks:
        if not rank.steps:
            yield f"the trace of rank {rank.rank} holds no whole step"
        elif rank.clock_s and abs(rank.step_s / rank.clock_s - 1) > TOLERANCE:
            yield (
                f"the parts of rank {rank.rank} add up to {1000 * rank.step_s:.1f} ms a step, and the loop's clock "
                f"says {1000 * rank.clock_s:.1f} ms"
            )


def of_rank(trace: Trace) -> RankProfile:
    """What the trace of a rank says."""
    record, phases, operators = trace.record, phases_of(trace), operators_of(trace)
    return RankProfile(
        rank=record.rank,
        trace=trace.path.name,
        trace_bytes=trace.path.stat().st_size,
        host=record.host,
        device=record.device,
        device_name=record.device_name,
        pipe_stage=record.pipe_stage,
        steps=device_steps(trace, phases) if trace.device_events else host_steps(trace, phases),
        operators=operator_costs(trace, operators),
        memory=memory_of_step(trace, operators),
        arrivals=arrivals_of(trace),
        waiting_calls=waiting_calls_of(trace),
        flops=record.flops,
        peak_flops=record.peak_flops,
    )
