"""Determined's core context on a cluster, made to survive a short outage of the master.

The calls that a lost answer or a busy master can break are private parts of Determined (0.38.1), since ranks wait for
each other around them: they are replaced on the objects.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from determined import core
from determined.common import util
from determined.common.api import bindings, errors

from determined_ds.protocol.best import finite
from determined_ds.runtime.master.stops import watch_for_stops

logger = logging.getLogger("determined_ds")

# As Determined's own, which retries where the connection fails, and also five times in 15 seconds where the master
# answers with one of these errors. DET_RETRY_CONFIG in the environment replaces it.
RETRIES = {
    "total": 20,
    "status": 5,
    "status_forcelist": [500, 502, 503, 504],
    "backoff_factor": 0.5,
    "allowed_methods": False,
}
WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
# A master's answer to metrics that it has already (``shallowUnionMetrics``), the same or others.
HAS_THEM = "overwriting existing metric keys is not supported"


@contextlib.contextmanager
def cluster_core_context(distributed: core.DistributedContext) -> Iterator[core.Context]:
    """Open the core context of a trial on a cluster."""
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(RETRIES))
    with core.init(
        distributed=distributed,
        preempt_mode=core.PreemptMode.ChiefOnly,
        tensorboard_mode=core.TensorboardMode.MANUAL,
    ) as context:
        settle = make_patient(context)
        if settle is not None:
            watch_for_stops(context, settle)
        yield context


def make_patient(context: Any) -> Callable[[float], bool] | None:
    """Make reports survive lost answers and short outages of the master.

    A report whose answer is lost is sent again; if the master refuses it as known, that is not a failure. Metrics are
    sent in the background, so a checkpoint is reported, and the best validation read, only after the master has all
    metrics before it; a trial that is killed just then would resume without them.

    Args:
        context: Determined's core context, opened.

    Returns:
        A function that waits, at most so many seconds, until the master has all reported metrics, and returns whether
        it has; None without a master.
    """
    session = getattr(context, "_session", None)
    if session is None:
        return None
    retry = util.get_max_retries_config()
    # A master refuses what it has with a 500, which must not be retried: these two calls check the answer.
    reports = session.with_retry(retry.new(status_forcelist=set(retry.status_forcelist or ()) - {500}))
    reports._persist_http_session()  # one connection for all of them, to the end of the process
    settle = _patient_metrics(context._metrics, reports)
    _patient_checkpoints(context.checkpoint, reports, settle)
    _patient_train(context.train, settle)
    return settle


def until_accepted(report: Callable[[], Any], is_accepted: Callable[[Exception], bool]) -> None:
    """Make a report, and again while the master cannot take it; ``is_accepted``: an error means that it has it."""
    for wait_s in (*WAITS_S, None):
        try:
            report()
            return
        except bindings.APIHttpError:  # 201, 204 ...: accepted; Determined's bindings know 200 alone
            return
        except errors.BadRequestException as error:
            if is_accepted(error):
                return
            if wait_s is None or getattr(error, "status_code", None) != 500:
                raise
            time.sleep(wait_s)


def _patient_metrics(metrics: Any, session: Any) -> Callable[..., bool]:
    """Returns the function that :func:`make_patient` returns."""
    shipper = metrics._shipper
    shipper._session = session
    post, queue = shipper._post_metrics, shipper._queue

    def post_once(**report: Any) -> None:
        until_accepted(lambda: post(**report), lambda error: HAS_THEM in str(error))
        queue.task_done()

    def settle(at_most_s: float = math.inf) -> bool:
        until_s = time.monotonic() + at_most_s
        with queue.all_tasks_done:
            while queue.unfinished_tasks and shipper.is_alive() and time.monotonic() < until_s:
                queue.all_tasks_done.wait(timeout=min(1.0, at_most_s))
        metrics._maybe_raise_exception()
        return not queue.unfinished_tasks

    shipper._post_metrics = post_once
    return settle


def _patient_checkpoints(checkpoints: Any, session: Any, settle: Callable[[], bool]) -> None:
    report = checkpoints._report_checkpoint
    checkpoints._session = session

    def report_once(storage_id: str, *args: Any, **kwargs: Any) -> None:
        def is_there(_: Exception) -> bool:
            try:
                session.get(f"/api/v1/checkpoints/{storage_id}")
            except errors.BadRequestException:
                return False
            return True

        settle()
        until_accepted(lambda: report(storage_id, *args, **kwargs), is_there)

    checkpoints._report_checkpoint = report_once


def _patient_train(train: Any, settle: Callable[[], bool]) -> None:
    best, early_exit = train.get_experiment_best_validation, train.report_early_exit

    def best_validation() -> float | None:
        settle()
        try:
            found = best()
        except (KeyError, TypeError, ValueError):  # an answer without a number: no validation yet
            return None
        return finite(found)

    def report_early_exit(reason: Any) -> None:
        try:
            early_exit(reason)
        except errors.APIException as error:
            if error.status_code != 400:  # 400: it was reported already
                raise
            logger.warning("the master does not take the early exit: %s", error)

    train.get_experiment_best_validation = best_validation
    train.report_early_exit = report_early_exit
    # A run does not fail for what is only shown.
    train.set_status = _forgiving(train.set_status)
    train.report_progress = _forgiving(train.report_progress)


def _forgiving(report: Callable[[Any], None]) -> Callable[[Any], None]:
    def tried(value: Any) -> None:
        try:
            report(value)
        except (
            errors.BadRequestException,
            TypeError,
        ) as error:  # TypeError: from an answer whose error is a text
            logger.warning("not reported to the master: %r: %s", value, error)

    return tried
