"""What a master may answer that ours does not: refusals of what it has, empty bodies, nulls, calls that it lacks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from determined import core
from determined.common import api, storage

from determined_ds.experiment.task import Task
from determined_ds.runtime.master import core_context as cluster
from tests.cluster.server import Fault, Refused, Request, Server, route

CONFLICT = "overwriting existing metric keys is not supported, conflicting key: loss"


class OddMaster:
    """Answers as its attributes say, and remembers what it took."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, int]] = []
        self.checkpoints: list[tuple[str, int]] = []  # with the number of metrics that were there before
        self.best: Any = {}
        self.refuses: dict[str, Refused] = {}
        self.slow_s = 0.0
        self.lock = threading.Lock()

    @route("POST", "/api/v1/trials/{trial_id}/metrics")
    def report(self, request: Request, trial_id: int) -> None:
        time.sleep(self.slow_s)
        self._refuse("metrics")
        body = request.body["metrics"]
        with self.lock:
            key = (request.body["group"], body["stepsCompleted"])
            if key in self.metrics:
                raise Refused(500, CONFLICT)
            self.metrics.append(key)

    @route("POST", "/api/v1/checkpoints")
    def checkpoint(self, request: Request) -> None:
        uuid = request.body["uuid"]
        if uuid in dict(self.checkpoints):
            raise Refused(500, "duplicate key value violates unique constraint")
        self._refuse("checkpoint")
        self.checkpoints.append((uuid, len(self.metrics)))

    @route("GET", "/api/v1/checkpoints/{uuid}")
    def known(self, request: Request, uuid: str) -> dict[str, Any]:
        """Less than the client's own bindings ask for."""
        if uuid not in dict(self.checkpoints):
            raise Refused(404, "no such checkpoint")
        return {"checkpoint": {"uuid": uuid}}

    @route("GET", "/api/v1/experiments/{experiment_id}/searcher/best_searcher_validation_metric")
    def best_validation(self, request: Request, experiment_id: int) -> Any:
        if self.best is None:
            raise Refused(404, "no validations for experiment")
        return self.best

    @route("POST", "/api/v1/trials/{trial_id}/early_exit")
    def early_exit(self, request: Request, trial_id: int) -> None:
        self._refuse("early_exit")

    @route("POST", "/api/v1/trials/{trial_id}/progress")
    def progress(self, request: Request, trial_id: int) -> None:
        self._refuse("progress")

    def _refuse(self, name: str) -> None:
        if name in self.refuses:
            raise self.refuses[name]


@pytest.fixture
def odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[OddMaster, Server, SimpleNamespace]]:
    """An odd master, its server, and a core context of Determined's own parts that talks to it."""
    monkeypatch.setenv("DET_RETRY_CONFIG", json.dumps({**cluster.RETRIES, "backoff_factor": 0.0}))
    monkeypatch.setattr(cluster, "WAITS_S", (0.0, 0.0, 0.0))
    master = OddMaster()
    server = Server([master], lambda token: ("trial", None))
    session = api.Session(server.url, "trial", "token", None).with_retry(
        cluster.util.get_max_retries_config()
    )
    ranks = core.DummyDistributedContext()
    metrics = core._MetricsContext(session, 1, 1)
    mode, files = core.TensorboardMode.MANUAL, storage.SharedFSStorageManager(str(tmp_path))
    context = SimpleNamespace(
        _session=session,
        _metrics=metrics,
        train=core.TrainContext(session, 1, 1, metrics, ranks, mode, None, None),
        checkpoint=core.CheckpointContext(ranks, files, session, "task", "allocation", mode, None, None),
    )
    metrics.start()
    cluster.make_patient(context)
    yield master, server, context
    server.close()
    assert not server.errors


Odd = tuple[OddMaster, Server, SimpleNamespace]


def report_checkpoint(context: SimpleNamespace, uuid: str) -> None:
    context.checkpoint._report_checkpoint(uuid, {}, {"steps_completed": 1})


def test_metrics_whose_answer_was_lost_are_not_refused_the_trial(odd: Odd) -> None:
    """Made again, they are refused by a real master even where they are the same."""
    master, server, context = odd
    server.inject(Fault(kind="close after", method="POST", path=".*/metrics"))
    context.train.report_training_metrics(1, {"loss": 1.0})
    context.train.report_training_metrics(2, {"loss": 1.0})
    context._metrics.close()
    assert master.metrics == [("training", 1), ("training", 2)]


def test_metrics_that_are_refused_for_another_reason_end_the_trial(odd: Odd) -> None:
    master, _, context = odd
    master.refuses["metrics"] = Refused(400, "invalid run id, 1 (reported) != 2 (expected)")
    context.train.report_training_metrics(1, {"loss": 1.0})
    with pytest.raises(api.errors.APIException, match="invalid run id"):
        context._metrics.close()


def test_a_checkpoint_is_reported_after_the_metrics_before_it(odd: Odd) -> None:
    """Else a trial that is killed just then goes on from the checkpoint, and its metrics are never sent."""
    master, _, context = odd
    master.slow_s = 0.05
    for step in range(5):
        context.train.report_training_metrics(step, {"loss": 1.0})
    report_checkpoint(context, "one")
    assert master.checkpoints == [("one", 5)]


@pytest.mark.parametrize("kind", ["close", "500", "close after"])
def test_a_checkpoint_is_reported_whatever_fails(odd: Odd, kind: Any) -> None:
    master, server, context = odd
    server.inject(Fault(kind=kind, method="POST", path="/api/v1/checkpoints", times=2))
    report_checkpoint(context, "one")
    assert master.checkpoints == [("one", 0)]


def test_an_answer_without_a_body_is_one() -> None:
    """Determined's bindings take 200 alone."""
    calls = []

    def report() -> None:
        calls.append(1)
        no_content: Any = SimpleNamespace(status_code=204, reason="No Content")
        raise api.bindings.APIHttpError("post_ReportCheckpoint", no_content)

    cluster.until_accepted(report, lambda error: False)
    assert calls == [1]


def test_a_checkpoint_that_is_refused_is_an_error(odd: Odd) -> None:
    master, server, context = odd
    master.refuses["checkpoint"] = Refused(500, "the disk is full")
    with pytest.raises(api.errors.APIException, match="the disk is full"):
        report_checkpoint(context, "one")
    assert len([call for call in server.calls if call.method == "POST"]) == 4


@pytest.mark.parametrize(
    ("answer", "best"),
    [
        (None, None),
        ({}, None),
        ({"metric": None}, None),
        ({"metric": "NaN"}, None),
        ({"metric": "-Infinity"}, None),
        ({"metric": 0}, 0.0),
        ({"metric": 1.5, "more": []}, 1.5),
    ],
)
def test_the_best_validation_may_be_missing(odd: Odd, answer: Any, best: float | None) -> None:
    master, _, context = odd
    master.best = answer
    assert context.train.get_experiment_best_validation() == best


def test_a_status_or_progress_that_is_not_taken_costs_nothing(odd: Odd) -> None:
    """This master has no call for a status; of the progress it says what is wrong in a text."""
    master, _, context = odd
    master.refuses["progress"] = Refused(501, "not implemented")
    context.train.set_status("training")
    context.train.report_progress(0.5)


def test_an_early_exit_may_be_known_already(odd: Odd) -> None:
    master, _, context = odd
    master.refuses["early_exit"] = Refused(400, "early exit has already been reported")
    context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
    master.refuses["early_exit"] = Refused(403, "not yours")
    with pytest.raises(api.errors.ForbiddenException):
        context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)


def test_nulls_in_the_experiment_config_are_what_was_not_said() -> None:
    hyperparameters: Any = None
    searcher = {"name": None, "metric": None, "smaller_is_better": None, "max_length": None}
    task = Task(
        hyperparameters=hyperparameters,
        exp_conf={"searcher": searcher, "resources": {"slots_per_trial": 0}},
        seed=0,
    )
    assert (task.is_search, task.metric, task.smaller_is_better, task.slots) == (False, "", True, 1)
    none = Task(hyperparameters=hyperparameters, exp_conf={"searcher": None, "resources": None}, seed=0)
    assert (none.is_search, none.smaller_is_better, none.slots) == (False, True, None)
