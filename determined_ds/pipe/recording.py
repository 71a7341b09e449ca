"""One optimizer step of a pipeline as it was carried out: which pass ran when on each rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from determined_ds.pipe.orders import BACKWARD, INPUT, Pipeline
from determined_ds.pipe.timeline import Span, awaited, bubble, timeline

LOAD = "L"  # beside the passes of a schedule: a micro-batch is loaded
DIGITS = 7  # of seconds


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step that ranks carried out.

    Args:
        schedule: Its name.
        ranks: Of the pipeline.
        micro_batches: Of the step.
        chunks: Parts of the model that a rank holds.
        machines: Whose clocks the times are of. One has one clock for all its ranks; the clocks of several are
            aligned by what passes wait for, see :func:`recorded_step`.
        spans: Of each rank, in the order in which they ran; in seconds from the first start.
    """

    schedule: str
    ranks: int
    micro_batches: int
    chunks: int
    machines: int
    spans: tuple[tuple[Span, ...], ...]

    @property
    def pipeline(self) -> Pipeline:
        """What the ranks were to compute in which order."""
        return Pipeline(
            schedule=self.schedule, ranks=self.ranks, micro_batches=self.micro_batches, chunks=self.chunks
        )

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
        for rank in self.spans:
            for span in rank:
                times.setdefault((span.op.kind, span.op.part), []).append(span.end - span.start)
        medians = {passes: statistics.median(seconds) for passes, seconds in times.items()}
        return timeline(self.pipeline, lambda op: medians.get((op.kind, op.part), 0.0))


def recorded_step(
    pipe: Pipeline, spans: Sequence[Sequence[Span]], machines: Sequence[str]
) -> RecordedStep | None:
    """A step of what its ranks have recorded, by the clock of the first rank's machine; None where a rank has nothing.

    A pass starts after the one that it waits for has ended. Messages in both directions bound by how much two clocks
    differ, and the middle of what is left is taken: right up to half the time of a message there and back.

    Args:
        pipe: The schedule.
        spans: Of each rank of the pipeline, each by the clock of its machine.
        machines: The name of each rank's machine.
    """
    if not all(spans):
        return None
    ends = {}
    for rank, own in enumerate(spans):
        for span in own:  # the input's half of a backward pass is what others wait for as one
            made = span.op._replace(kind=BACKWARD) if span.op.kind == INPUT else span.op
            ends[made] = rank, span.end
    # (machine that waits, machine that is waited for) -> the least that its clock may be ahead.
    ahead: dict[tuple[str, str], float] = {}
    for rank, own in enumerate(spans):
        for span in own:
            for waited in () if span.op.kind == LOAD else awaited(span.op, pipe.parts):
                at, end = ends.get(waited, (rank, span.start))
                pair = machines[rank], machines[at]
                ahead[pair] = max(ahead.get(pair, -float("inf")), end - span.start)
    offsets, todo = {machines[0]: 0.0}, [machines[0]]
    while todo:  # from each machine whose offset is known to those that it exchanges messages with
        known = todo.pop()
        for machine in [one for one, other in ahead if other == known and one not in offsets]:
            least = ahead[machine, known]
            offsets[machine] = offsets[known] + (least - ahead.get((known, machine), -least)) / 2
            todo.append(machine)
    shifts = [offsets.get(machine, 0.0) for machine in machines]
    zero = min(own[0].start + by for own, by in zip(spans, shifts, strict=True))

    def moved(span: Span, by: float) -> Span:
        return Span(op=span.op, start=round(span.start + by, DIGITS), end=round(span.end + by, DIGITS))

    return RecordedStep(
        schedule=pipe.schedule,
        ranks=pipe.ranks,
        micro_batches=pipe.micro_batches,
        chunks=pipe.chunks,
        machines=len(set(machines)),
        spans=tuple(
            tuple(moved(span, by - zero) for span in own) for own, by in zip(spans, shifts, strict=True)
        ),
    )
