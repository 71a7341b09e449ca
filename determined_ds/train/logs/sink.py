"""Where reported metrics go beside Determined: whatever a training reports to its core context is sent on from there.

Trials, sessions, Hugging Face trainers and Core API scripts all report there, on a cluster and off it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from determined_ds.rundir.launches import Launch
from determined_ds.train.logs.messages import COMPLETED, FAILED, STOPPED

GROUPS = TRAINING, VALIDATION = "training", "validation"


class Sink(Protocol):
    """Takes what the chief reports. Its methods must neither wait nor raise, except for the end, which may wait."""

    def begin(self, launch: Launch) -> None:
        """Training begins, or continues: the first metrics are about to be reported."""

    def report(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Metrics were reported.

        Args:
            group: ``training``, ``validation``, or another one of a script.
            steps_completed: Batches trained.
            metrics: As they were reported.
        """

    def end(self, status: str) -> None:
        """Training has ended: ``completed``, ``stopped`` or ``failed``. Not called where it has not begun."""


@contextlib.contextmanager
def sent_on(core_context: Any, sinks: Sequence[Sink], launch: Callable[[], Launch]) -> Iterator[None]:
    """Within, what is reported to a core context is sent to sinks too.

    They begin with the first report: a run that resumes has loaded its checkpoint by then.

    Args:
        core_context: Of the chief.
        sinks: Theirs.
        launch: Says what is trained.
    """
    forward = _Forward(sinks, launch)
    train, preempt = core_context.train, core_context.preempt
    for group in GROUPS:
        name = f"report_{group}_metrics"
        setattr(train, name, forward.sending(getattr(train, name), group))
    train.report_metrics = forward.sending(train.report_metrics)
    preempt.should_preempt = forward.watching(preempt.should_preempt)
    try:
        yield
    except BaseException as error:
        forward.end(COMPLETED if isinstance(error, SystemExit) and not error.code else FAILED)
        raise
    forward.end(COMPLETED)


class _Forward:
    """What is remembered between reports."""

    def __init__(self, sinks: Sequence[Sink], launch: Callable[[], Launch]) -> None:
        self._sinks = sinks
        self._launch = launch
        self._has_begun = self._is_stopping = False
        self._depth = 0  # one report may be made by another, e.g. by that of any group

    def sending(self, report: Callable[..., Any], group: str = "") -> Callable[..., Any]:
        """A report that is sent on.

        Args:
            report: Of the core context.
            group: Of the metrics; "" where it is the first argument.
        """

        @functools.wraps(report)
        def sending(*given: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                result = report(*given, **options)
            finally:
                self._depth -= 1
            if not self._depth:
                self._send(*((group, *given) if group else given), **options)
            return result

        return sending

    def _send(
        self, group: str, steps_completed: int, metrics: Mapping[str, Any], *_: Any, **more: Any
    ) -> None:
        if not self._has_begun:
            self._has_begun = True
            launch = self._launch()
            for sink in self._sinks:
                sink.begin(launch)
        for sink in self._sinks:
            sink.report(group, steps_completed, metrics)

    def watching(self, should_preempt: Callable[..., bool]) -> Callable[..., bool]:
        """The question whether to stop, whose answer is remembered."""

        @functools.wraps(should_preempt)
        def watching(*given: Any, **options: Any) -> bool:
            answer = should_preempt(*given, **options)
            self._is_stopping = self._is_stopping or bool(answer)
            return answer

        return watching

    def end(self, status: str) -> None:
        """Training has ended."""
        if not self._has_begun:
            return
        if status == COMPLETED and self._is_stopping:
            status = STOPPED
        for sink in self._sinks:
            sink.end(status)
