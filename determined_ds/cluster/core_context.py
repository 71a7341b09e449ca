"""Determined's core context on a cluster: it survives a short outage of the master, and stops where the searcher stops.

**Outages.** Private parts of Determined (0.38.1) are replaced on the objects. A report whose answer is lost is sent
again; if the master then refuses it as known, that is not a failure. A checkpoint is reported, and the best validation
read, only after the master has all metrics before it; a trial that is killed just then would resume without them.

**Stops.** The chief reports a validation, and the master passes it to the searcher before it answers. If the searcher
stops the trial, Determined 0.38.1 sets its state to ``STOPPING_COMPLETED`` and sends no signal: the container would
train to the end. So the chief reads the state of its trial after each validation, and the run stops as at a preemption,
with a checkpoint and exit 0, which completes a trial in that state. The stop is not acknowledged: that would ask the
master to start the trial again. Other states come with a signal.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from determined import core
from determined.common import util
from determined.common.api import bindings, errors

from determined_ds.checkpoints.files import finite
from determined_ds.rundir.records import FAULTS_OF_MASTER, RECOVERY, Faults, faults_in

logger = logging.getLogger("determined_ds")

# As Determined's own, and also five times in 15 seconds where the master answers with one of these errors.
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
STOPPED = "STATE_STOPPING_COMPLETED"
# These let each trial train to its end: of the master's searchers, only asha_stopping.go makes a Stop.
NEVER_STOP = frozenset({"single", "random", "grid"})
PATIENCE_S, AGAIN_AFTER_S = 5, 15.0  # the ranks wait: a master that does not answer costs 5 seconds of 20
# What a session raises without an answer, and with an unexpected one.
NO_ANSWER = (errors.BadRequestException, OSError, ValueError, KeyError, TypeError)


@contextlib.contextmanager
def cluster_core_context(distributed: core.DistributedContext) -> Iterator[core.Context]:
    """Open the core context of a trial on a cluster, for these ranks."""
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(RETRIES))
    preempts, tensorboard = core.PreemptMode.ChiefOnly, core.TensorboardMode.MANUAL
    with core.init(distributed=distributed, preempt_mode=preempts, tensorboard_mode=tensorboard) as opened:
        context: Any = opened
        shown: queue.SimpleQueue[tuple[Callable[[Any], None], Any] | None] = queue.SimpleQueue()

        def show() -> None:  # in a thread; a run does not fail for what is only shown
            while (job := shown.get()) is not None:
                try:
                    job[0](job[1])
                except NO_ANSWER as error:
                    logger.warning("not reported to the master: %r: %s", job[1], error)

        sender = threading.Thread(target=show, name="shown-to-master", daemon=True)
        if context._session is not None:
            settle = _make_patient(context)
            sender.start()
            # Training does not wait for what is only shown: the master may be away, and is asked again for a while.
            status, progress = context.train.set_status, context.train.report_progress
            context.train.set_status = lambda value: shown.put((status, value))
            context.train.report_progress = lambda value: shown.put((progress, value))
            searcher = (context.info.trial._config.get("searcher") or {}).get("name") or "single"
            if distributed.rank == 0 and searcher not in NEVER_STOP:
                _stop_with_searcher(context, searcher, settle)
        yield context
        shown.put(None)
        if sender.is_alive():
            sender.join(PATIENCE_S)


def _make_patient(context: Any) -> Callable[..., bool]:
    """Make reports of an opened core context survive lost answers and short outages of the master.

    Returns a function that waits, at most so many seconds, until the master has all metrics, and says whether it has.
    """
    retry = util.get_max_retries_config()
    # A master refuses what it has with a 500, which must not be retried: these two calls check the answer.
    retried = set(retry.status_forcelist or ()) - {500}
    session = context._session.with_retry(retry.new(status_forcelist=retried))
    session._persist_http_session()  # one connection for all of them, to the end of the process
    metrics, checkpoints, train = context._metrics, context.checkpoint, context.train
    shipper = metrics._shipper
    shipper._session = checkpoints._session = session
    post, waiting, report = shipper._post_metrics, shipper._queue, checkpoints._report_checkpoint
    best, early_exit = train.get_experiment_best_validation, train.report_early_exit

    def post_once(**metrics_of_step: Any) -> None:
        _until_accepted(lambda: post(**metrics_of_step), lambda error: HAS_THEM in str(error))
        waiting.task_done()

    def settle(at_most_s: float = math.inf) -> bool:
        until_s = time.monotonic() + at_most_s
        with waiting.all_tasks_done:
            while waiting.unfinished_tasks and shipper.is_alive() and time.monotonic() < until_s:
                waiting.all_tasks_done.wait(timeout=min(1.0, at_most_s))
        metrics._maybe_raise_exception()
        return not waiting.unfinished_tasks

    def report_checkpoint(storage_id: str, *args: Any, **kwargs: Any) -> None:
        def is_there(_: Exception) -> bool:
            with contextlib.suppress(errors.BadRequestException):
                return bool(session.get(f"/api/v1/checkpoints/{storage_id}"))
            return False

        settle()
        _until_accepted(lambda: report(storage_id, *args, **kwargs), is_there)

    def best_validation() -> float | None:
        settle()
        with contextlib.suppress(
            KeyError, TypeError, ValueError
        ):  # an answer without a number: no validation yet
            return finite(best())
        return None

    def report_early_exit(reason: Any) -> None:
        try:
            early_exit(reason)
        except errors.APIException as error:
            if error.status_code != 400:  # 400: it was reported already
                raise
            logger.warning("the master does not take the early exit: %s", error)

    shipper._post_metrics = post_once
    checkpoints._report_checkpoint = report_checkpoint
    train.get_experiment_best_validation = best_validation
    train.report_early_exit = report_early_exit
    return settle


def _until_accepted(report: Callable[[], Any], is_accepted: Callable[[Exception], bool]) -> None:
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


# ------------------------------------------------------------------------------------------- faults of the trial


def faults_on_master(context: Any) -> Faults:
    """The faults that earlier starts of this trial have recorded."""
    if context._session is None or context.info.trial._trial_run_id <= 1:
        return Faults()
    # Only now, and not from determined.common, which warns three times in each task's log.
    from determined.experimental import Trial

    trial = context.info.trial
    reports = Trial(trial_id=trial.trial_id, session=context._session).iter_metrics(RECOVERY)
    return faults_in(each.metrics or {} for each in reports)


def record_on_master(context: Any, faults: Faults, batch: int, **metrics: float) -> None:
    """Report all faults of a trial, with some numbers for the web UI; any rank may.

    The master archives what earlier processes have reported of batches after this one, and in this group of it too. So
    it has to be one that the next start does not go back behind, and each report has all faults.
    """
    trial = context.info.trial
    values = bindings.v1Metrics(
        avgMetrics={**metrics, f"{FAULTS_OF_MASTER}{len(faults.all)}": faults.dumped()}
    )
    report = bindings.v1TrialMetrics(
        metrics=values, trialId=trial.trial_id, trialRunId=trial._trial_run_id, stepsCompleted=batch
    )
    body = bindings.v1ReportTrialMetricsRequest(metrics=report, group=RECOVERY)
    session = context._session.with_retry(util.get_max_retries_config())
    _until_accepted(
        lambda: bindings.post_ReportTrialMetrics(session, body=body, metrics_trialId=trial.trial_id),
        lambda error: HAS_THEM in str(error),  # another rank has met it too
    )


def _stop_with_searcher(context: Any, searcher: str, settle: Callable[..., bool]) -> None:
    """Have the chief's preemption context also stop where the searcher has stopped the trial, with its ``reason``.

    It is asked after each report of a validation, once ``settle`` has waited until the master has all metrics.
    """
    preempt, train, session = context.preempt, context.train, context._session.with_retry(0)
    path, is_due, has_warned, not_before_s = (
        f"/api/v1/trials/{context.info.trial.trial_id}",
        False,
        False,
        0.0,
    )
    report, is_signalled, preempt.reason = train.report_validation_metrics, preempt.should_preempt, ""

    def report_and_ask_then(*args: Any, **kwargs: Any) -> None:
        nonlocal is_due
        report(*args, **kwargs)
        is_due = True

    def should_preempt(auto_ack: bool = True) -> bool:
        """Only a signal is acknowledged."""
        nonlocal is_due, has_warned, not_before_s
        stops = bool(is_signalled(auto_ack))
        if is_due and time.monotonic() >= not_before_s:
            try:
                if not settle(PATIENCE_S):
                    raise TimeoutError("it has not taken the last metrics yet")
                answer = session.get(path, timeout=PATIENCE_S).json()
                if answer["trial"]["state"] == STOPPED:
                    preempt.reason = f"by the searcher ({searcher})"
                is_due = False
            except NO_ANSWER as error:
                not_before_s = time.monotonic() + AGAIN_AFTER_S
                if not has_warned:
                    has_warned = True
                    message = "cannot read whether the searcher has stopped this trial; it is asked again: %r"
                    logger.warning(message, error)
        return stops or bool(preempt.reason)

    train.report_validation_metrics, preempt.should_preempt = report_and_ask_then, should_preempt
