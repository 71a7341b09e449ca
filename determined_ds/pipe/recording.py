"""One optimizer step of a pipeline as it was carried out: which pass ran when on each rank, by one machine's clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.timeline import Span, bubble, timeline

LOAD = "L"  # beside the passes of a schedule: a micro-batch is loaded
DIGITS = 7  # of seconds


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that ranks carried out."""

    pipeline: Pipeline  # what they were to compute in which order
    spans: tuple[tuple[Span, ...], ...]  # of each rank, as they ran; in seconds from the first start

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they neither compute nor load, from the first start to the last end."""
        return bubble(self.spans)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(rank[-1].end for rank in self.spans)

    def planned(self) -> list[list[Span]]:
        """The same schedule with passes of the median times of this step's, and messages that take no time."""
        times: dict[tuple[str, int], list[float]] = {}
        for span in (each for rank in self.spans for each in rank):
            times.setdefault((span.op.kind, span.op.part), []).append(span.end - span.start)
        medians = {passes: statistics.median(seconds) for passes, seconds in times.items()}
        return timeline(self.pipeline, lambda op: medians.get((op.kind, op.part), 0.0))


def recorded_step(pipe: Pipeline, spans: Sequence[Sequence[Span]]) -> RecordedStep | None:
    """A step of what each of its ranks has recorded by one clock; None where a rank has nothing."""
    if not all(spans):
        return None
    zero = min(own[0].start for own in spans)

    def since(seconds: float) -> float:
        return round(seconds - zero, DIGITS)

    moved = (tuple(Span(op=s.op, start=since(s.start), end=since(s.end)) for s in own) for own in spans)
    return RecordedStep(pipeline=pipe, spans=tuple(moved))
