"""Determined's core context on a cluster, patient with a master that fails for a while.

What a lost answer or a busy master may cost stands in private parts of Determined's (0.38.1), since its ranks may wait
for each other around them: each is replaced on the object, and left alone where it is not as expected.
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
from determined_ds.runtime.master.searcher_stops import watch_for_stops

logger = logging.getLogger("determined_ds")

# As Determined's own, which tries a call again where the connection fails, and also where the master answers that it
# cannot now: then five times, in 15 seconds. Whoever sets DET_RETRY_CONFIG decides instead.
RETRIES = {
    "total": 20,
    "status": 5,
    "status_forcelist": [500, 502, 503, 504],
    "backoff_factor": 0.5,
    "allowed_methods": False,
}
WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
# How a master answers to metrics that it has (``shallowUnionMetrics``), be they the same or not.
HAS_THEM = "overwriting existing metric keys is not supported"


@contextlib.contextmanager
def cluster_core_context(distributed: core.DistributedContext) -> Iterator[core.Context]:
    """Open the core context of a trial on a cluster.

    Args:
        distributed: The ranks.
    """
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
    """Have no answer of the master cost more than it has to.

    A report whose answer is lost is made again, and a master refuses what it has: that is no failure. Metrics are
    sent behind the trial's back: a checkpoint is reported, and the best validation asked for, only when the master
    has all that came before; a trial that is killed just then would go on without them.

    Args:
        context: Determined's core context, opened.

    Returns:
        A function that waits, so many seconds at most, until the master has all metrics that were reported, and says
        whether it has; None where there is no master.
    """
    session = getattr(context, "_session", None)
    if session is None:
        return None
    retry = util.get_max_retries_config()
    # A master refuses what it has with a 500, which it is no use to try again: these two calls look at the answer.
    reports = session.with_retry(retry.new(status_forcelist=set(retry.status_forcelist or ()) - {500}))
    reports._persist_http_session()  # one connection for all of them; it is needed to the end of the process
    settle = _patient_metrics(context._metrics, reports)
    _patient_checkpoints(context.checkpoint, reports, settle)
    _patient_train(context.train, settle)
    return settle


def until_accepted(report: Callable[[], Any], is_accepted: Callable[[Exception], bool]) -> None:
    """Make a report, again where the master cannot take it now.

    Args:
        report: Makes it.
        is_accepted: Whether an error only says that the master has it.
    """
    for wait_s in (*WAITS_S, None):
        try:
            report()
            return
        except bindings.APIHttpError:  # 201, 204 ...: taken; Determined's bindings know 200 alone
            return
        except errors.BadRequestException as error:
            if is_accepted(error):
                return
            if wait_s is None or getattr(error, "status_code", None) != 500:
                raise
            time.sleep(wait_s)


def _patient_metrics(metrics: Any, session: Any) -> Callable[..., bool]:
    """Returns a function that waits until the master has all metrics that were reported, and says whether it has."""
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
        except (KeyError, TypeError, ValueError):  # an answer without a number: there is none yet
            return None
        return finite(found)

    def report_early_exit(reason: Any) -> None:
        try:
            early_exit(reason)
        except errors.APIException as error:
            if (
                error.status_code != 400
            ):  # it has been reported already, as Determined's own code means to see it
                raise
            logger.warning("the master does not take the early exit: %s", error)

    train.get_experiment_best_validation = best_validation
    train.report_early_exit = report_early_exit
    # What is only shown is not worth a run.
    train.set_status = _forgiving(train.set_status)
    train.report_progress = _forgiving(train.report_progress)


def _forgiving(tell: Callable[[Any], None]) -> Callable[[Any], None]:
    def told(value: Any) -> None:
        try:
            tell(value)
        except (
            errors.BadRequestException,
            TypeError,
        ) as error:  # TypeError: of an answer whose error is a text
            logger.warning("the master was not told %r: %s", value, error)

    return told
