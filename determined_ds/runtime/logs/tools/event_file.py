"""TensorBoard, for scripts: of a trial the library writes these scalars already. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_ds.runtime.logs.messages import NumbersAt, ShownRun


class EventFile:
    """A file of events.

    A resumed run begins another one, which has TensorBoard drop what the earlier ones hold after the batch that it
    continues from.

    Args:
        about: The run.
        options: None.
    """

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        self._about = about
        self._writer: Any = None

    def begin(self) -> str:
        """Make the file."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(self._about.events)
        if self._about.continues is not None:
            start = SessionLog(status=SessionLog.START)
            # Source: torch 2.13's ``FileWriter`` writes the same for its ``purge_step``.
            self._writer.add_event(Event(step=self._about.continues + 1, session_log=start))
        return self._about.tensorboard

    def report(self, reports: list[NumbersAt]) -> None:
        """Write scalars."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for report in reports:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in report.metrics.items()]
            self._writer.add_event(
                Event(step=report.step, wall_time=report.time, summary=Summary(value=values))
            )
        self._writer.flush()

    def end(self, status: str) -> None:
        """Close the file."""
        self._writer.close()
