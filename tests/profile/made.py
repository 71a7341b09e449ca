"""Traces made by hand, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.profile.trace_file import Allocation, Event, Trace
from determined_ds.protocol.profile_files import STEP, CapturedStep, CaptureRecord

MAIN, WORKER = 1, 2  # threads


class Made:
    """A trace of a rank, event by event.

    Args:
        record: What the rank says of it.
    """

    def __init__(self, **record: Any) -> None:
        self._record = CaptureRecord(**{"rank": 0, "ranks": 1, **record})
        self._events: list[Event] = []
        self._allocations: list[Allocation] = []
        self.held: list[Mapping[str, Sequence[Sequence[int]]]] = []

    def step(self, begin: float, end: float) -> Made:
        """A whole training step."""
        index = sum(event.name.startswith(STEP) for event in self._events)
        return self.mark(f"{STEP}#{index}", begin, end)

    def mark(self, name: str, begin: float, end: float, thread: int = MAIN, **args: Any) -> Made:
        """A range."""
        return self._add(name, "user_annotation", begin, end, thread, args)

    def op(self, name: str, begin: float, end: float, number: int | None = None, thread: int = MAIN) -> Made:
        """An operator, with its sequence number."""
        args = {} if number is None else {"Sequence number": number}
        return self._add(name, "cpu_op", begin, end, thread, args)

    def shaped(self, name: str, begin: float, end: float, *shapes: list[int]) -> Made:
        """An operator with the shapes of its inputs."""
        return self._add(name, "cpu_op", begin, end, MAIN, {"Input Dims": list(shapes)})

    def collective(self, kind: str, begin: float, end: float, num_floats: int = 1000) -> Made:
        """A collective of gloo."""
        return self.mark(
            f"gloo:{kind}", begin, end, WORKER, **{"Input Dims": [[num_floats]], "Input type": ["float"]}
        )

    def memory(self, at: float, num_bytes: int, address: int) -> Made:
        """An allocation, or a release."""
        self._allocations.append(
            Allocation(
                at=1000 * at, num_bytes=num_bytes, total_bytes=0, device_type=0, tid=MAIN, address=address
            )
        )
        return self

    def _add(
        self, name: str, category: str, begin: float, end: float, thread: int, args: dict[str, Any]
    ) -> Made:
        self._events.append(Event(name, category, 1000 * begin, 1000 * end, 1, thread, args))
        return self

    @property
    def trace(self) -> Trace:
        """The trace."""
        events = sorted(self._events, key=lambda event: (event.begin, -event.end))
        steps = tuple(
            CapturedStep(batch=index + 1, seconds=(event.end - event.begin) / 1e6)
            for index, event in enumerate(each for each in events if each.name.startswith(STEP))
        )
        record = CaptureRecord(**{**vars(self._record), "steps": steps})
        return Trace(
            path=Path("rank0.json.gz"),
            record=record,
            events=events,
            allocations=sorted(self._allocations, key=lambda each: each.at),
            main_thread=MAIN,
            held=self.held,
        )
