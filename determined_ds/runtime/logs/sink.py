"""Where reported metrics go beside Determined: whatever a training reports to its core context is sent on from there.

Trials, sessions, Hugging Face trainers and Core API scripts all report there, on a cluster and off it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from determined_ds.protocol.launches import Launch

TRAINING, VALIDATION = "training", "validation"


class Sink(Protocol):
    """Takes what the chief reports. Its methods must neither wait nor raise."""

    def begin(self, launch: Launch) -> None:
        """Training begins, or continues."""

    def report(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Metrics were reported.

        Args:
            group: ``training`` or ``validation``.
            steps_completed: Batches trained.
            metrics: As they were reported.
        """

    def end(self, status: str) -> None:
        """Training has ended: ``completed``, ``stopped`` or ``failed``."""


def send_on(train: Any, sinks: Sequence[Sink]) -> None:
    """Have what is reported to a core context be sent to sinks too.

    Args:
        train: ``core_context.train`` of the chief.
        sinks: Theirs.
    """
    for group in (TRAINING, VALIDATION):
        name = f"report_{group}_metrics"
        setattr(train, name, _sending(getattr(train, name), group, sinks))


def _sending(report: Callable[..., Any], group: str, sinks: Sequence[Sink]) -> Callable[..., Any]:
    @functools.wraps(report)
    def sending(steps_completed: int, metrics: dict[str, Any], *more: Any, **options: Any) -> Any:
        result = report(steps_completed, metrics, *more, **options)
        for sink in sinks:
            sink.report(group, steps_completed, metrics)
        return result

    return sending
