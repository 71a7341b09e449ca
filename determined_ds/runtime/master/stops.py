"""Trials that their searcher stops: Determined 0.38.1 changes the state of such a trial and sends it no signal.

The chief reports a validation, and the master passes it to the searcher before it answers. If the searcher stops the
trial, the master only sets its state to ``STOPPING_COMPLETED``, and the container would train to the end. So the chief
reads the state of its trial after each validation, and the run stops as at a preemption, with a checkpoint and exit 0,
which completes a trial in that state. The stop is not acknowledged: that would ask the master to start the trial again.

Other states need not be read: a trial that is paused, canceled or preempted gets a signal, and a killed one ends.

Source: ``ReportTrialMetrics``, ``handleSearcherActions``, ``PatchSearcherState``, ``transition`` and
``handleAllocationExit`` in determined 0.38.1's ``master/internal/{api_trials,experiment,trial}.go``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from determined.common.api import errors

from determined_ds.cluster_log import warning_line

logger = logging.getLogger("determined_ds")

STOPPED = "STATE_STOPPING_COMPLETED"
# These let each trial train to its end: of the master's searchers, only asha_stopping.go makes a Stop.
NEVER_STOP = frozenset({"single", "random", "grid"})
# The ranks wait for the answer, so a master that does not answer costs 5 seconds of 20.
PATIENCE_S = 5
AGAIN_AFTER_S = 15.0
# What a session raises without an answer, and with an unexpected one.
NO_ANSWER = (errors.BadRequestException, OSError, ValueError, KeyError, TypeError)


def watch_for_stops(context: Any, settle: Callable[[float], bool]) -> None:
    """Have a trial's chief stop where its searcher stops the trial; does nothing for searchers that never do.

    Args:
        context: Determined's core context on a cluster, opened.
        settle: See :func:`~determined_ds.runtime.master.core_context.make_patient`.
    """
    trial = context.info.trial
    searcher = (trial._config.get("searcher") or {}).get("name") or "single"
    if context.distributed.rank == 0 and searcher not in NEVER_STOP:
        context.preempt = SearcherStops(context, trial.trial_id, searcher, settle)


class SearcherStops:
    """The chief's preemption context, which also stops where the searcher has stopped the trial.

    Args:
        context: The core context, whose validation reports it follows.
        trial_id: Of the trial.
        searcher: ``searcher.name``.
        settle: See :func:`watch_for_stops`.
    """

    def __init__(self, context: Any, trial_id: int, searcher: str, settle: Callable[[float], bool]) -> None:
        self._preempt = context.preempt
        self._session = context._session.with_retry(0)
        self._path = f"/api/v1/trials/{trial_id}"
        self._searcher = searcher
        self._settle = settle
        self._is_due = False
        self._not_before_s = 0.0
        self._has_warned = False
        self._is_stopped = False
        self._follow(context.train)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._preempt, name)

    def _follow(self, train: Any) -> None:
        report = train.report_validation_metrics

        def report_and_ask_then(*args: Any, **kwargs: Any) -> None:
            report(*args, **kwargs)
            self._is_due = True

        train.report_validation_metrics = report_and_ask_then

    @property
    def reason(self) -> str:
        """Why the run stops, if because of the searcher; else empty."""
        return f"by the searcher ({self._searcher})" if self._is_stopped else ""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        """Whether to stop. Only a signal is acknowledged, at once with ``auto_ack``."""
        is_signalled = bool(self._preempt.should_preempt(auto_ack))
        if self._is_due and time.monotonic() >= self._not_before_s:
            no_answer = self._ask()
            if no_answer:
                self._ask_later(no_answer)
        return is_signalled or self._is_stopped

    def _ask(self) -> str:
        """Read the trial's state, once the master has its validation. Returns why there was no answer, or ""."""
        if not self._settle(PATIENCE_S):
            return "it has not taken the last metrics yet"
        try:
            state = self._session.get(self._path, timeout=PATIENCE_S).json()["trial"]["state"]
        except NO_ANSWER as error:
            return f"{type(error).__name__}: {error}"
        self._is_due = False
        self._is_stopped = state == STOPPED
        return ""

    def _ask_later(self, no_answer: str) -> None:
        self._not_before_s = time.monotonic() + AGAIN_AFTER_S
        if not self._has_warned:
            self._has_warned = True
            message = f"cannot read from the master whether the searcher has stopped this trial ({no_answer})"
            logger.warning("%s", warning_line(f"{message}; training continues, and it is asked again"))
