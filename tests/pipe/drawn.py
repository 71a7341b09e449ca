"""Pipelines for properties: any schedule that has an order."""

from __future__ import annotations

from hypothesis import strategies as st

from determined_ds.pipe.orders import DUALPIPEV, INTERLEAVED, SCHEDULES, Pipeline


@st.composite
def pipelines(draw: st.DrawFn, *schedules: str) -> Pipeline:
    schedule, ranks = draw(st.sampled_from(schedules or SCHEDULES)), draw(st.integers(1, 6))
    chunks = {INTERLEAVED: draw(st.integers(1, 4)), DUALPIPEV: 2}.get(schedule, 1)
    micro_batches = draw(st.integers(1, 16))
    if schedule == DUALPIPEV:
        micro_batches += 2 * ranks - 1
    if schedule == INTERLEAVED and chunks > 1:
        micro_batches = ranks * draw(st.integers(1, 4))
    return Pipeline(schedule=schedule, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
