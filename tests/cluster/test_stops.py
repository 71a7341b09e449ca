"""A trial that its searcher stops: by its state alone, as Determined 0.38.1 does it, or with a signal, too.

The chief's side is made of Determined's own parts, as in a trial; the master is ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from determined import core
from determined.common import api, storage

from determined_ds.runtime.master import core_context as cluster
from determined_ds.runtime.master import stops
from tests.cluster.master import Master
from tests.cluster.server import Fault, FaultKind
from tests.cluster.state import Trial
from tests.cluster.still import User, still_master
from tests.command import ROOT

ASHA = {
    "name": "adaptive_asha",
    "metric": "validation_loss",
    "smaller_is_better": True,
    "max_trials": 3,
    "max_concurrent_trials": 2,
    "time_metric": "batches",
    "max_time": 40,
    "divisor": 2,
    "max_rungs": 2,
    "mode": "aggressive",
}


class Chief:
    """The chief of a trial, as far as it talks to the master.

    Args:
        master: Whose trial it is.
        trial: The trial.
        folder: For its checkpoints.
        ranks: The ranks of the trial.
    """

    def __init__(self, master: Master, trial: Trial, folder: Path, ranks: Any = None) -> None:
        self.trial, self._master = trial, master
        running = trial.running
        assert running is not None
        self.allocation = running
        running.ready = True
        config = master.experiments[trial.experiment_id].config
        session = api.Session(master.server.url, "trial", running.token, None)
        ranks = ranks or core.DummyDistributedContext()
        metrics = core._MetricsContext(session, trial.id, trial.run_id)
        mode, files = core.TensorboardMode.MANUAL, storage.SharedFSStorageManager(str(folder))
        train = core.TrainContext(session, trial.id, trial.experiment_id, metrics, ranks, mode, None, None)
        self.core: Any = SimpleNamespace(
            _session=session,
            _metrics=metrics,
            distributed=ranks,
            info=SimpleNamespace(trial=SimpleNamespace(trial_id=trial.id, _config=config)),
            train=train,
            checkpoint=core.CheckpointContext(ranks, files, session, "", running.id, mode, None, None),
            preempt=core.PreemptContext(session, running.id, ranks, core.PreemptMode.ChiefOnly),
        )
        metrics.start()
        self.core.preempt.start()
        settle = cluster.make_patient(self.core)
        assert settle is not None
        stops.watch_for_stops(self.core, settle)

    def validate(self, batches: int, loss: float) -> None:
        """Report a validation, as the loop does it."""
        report = {"validation_loss": loss, "batches": batches}
        self.core.train.report_validation_metrics(steps_completed=batches, metrics=report)

    def must_stop(self) -> bool:
        """What the loop asks at a boundary and from time to time."""
        return bool(self.core.preempt.should_preempt())

    @property
    def num_asked(self) -> int:
        """How often the state of the trial was asked for."""
        path = f"/api/v1/trials/{self.trial.id}"
        return len([c for c in self._master.server.calls if (c.method, c.path) == ("GET", path)])

    def close(self) -> None:
        """Ask the master for nothing more: its thread would do so for as long as this process lives."""
        self.core.preempt.close()

    def exit(self) -> None:
        """The container ends, with 0."""
        self.close()
        self.core._metrics.close()
        self._master.exited(self.allocation, 0)


StartTrials = Callable[..., tuple[Master, list[Chief]]]


@pytest.fixture
def start_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartTrials]:
    """``start_trials(searcher, **options_of_the_master)``: the first trials of ``const.yaml`` with a searcher."""
    masters, chiefs = [], list[Chief]()

    def start(searcher: dict[str, Any], **options: Any) -> tuple[Master, list[Chief]]:
        monkeypatch.setattr(stops, "AGAIN_AFTER_S", 0.0)
        masters.append(still_master(**options))
        master = masters[-1].__enter__()
        config = yaml.safe_load((ROOT / "experiments/gpt2/const.yaml").read_text())
        experiment = User(master).create({**config, "searcher": searcher})
        chiefs.extend(Chief(master, trial, tmp_path) for trial in master.trials_of(experiment))
        return master, chiefs

    yield start
    for chief in chiefs:
        chief.close()
    for master in masters:
        master.__exit__(None, None, None)


def test_the_state_stops_a_trial_after_its_rung(start_trials: StartTrials) -> None:
    """Nothing is acknowledged that was not asked; exit 0 is the trial's end, and the search goes on."""
    master, (winner, loser) = start_trials(ASHA)
    winner.validate(20, 1.0)
    assert not winner.must_stop()
    loser.validate(10, 2.0)
    assert not loser.must_stop()
    loser.validate(20, 2.0)
    assert loser.must_stop()
    assert loser.core.preempt.reason == "by the searcher (adaptive_asha)"
    assert loser.must_stop()
    assert (winner.num_asked, loser.num_asked) == (1, 2)

    loser.exit()
    assert not loser.allocation.preempted
    assert not loser.allocation.acked
    assert loser.trial.state == "COMPLETED"
    assert [trial.state for trial in master.trials.values()] == ["ACTIVE", "COMPLETED", "ACTIVE"]


def test_the_state_is_asked_for_once_a_validation(start_trials: StartTrials) -> None:
    """Only then may it have changed: the master shows a validation to the searcher before it answers."""
    _, (chief, _) = start_trials(ASHA)
    for batches in (5, 10):
        chief.core.train.report_training_metrics(batches, {"loss": 1.0})
        assert not any(chief.must_stop() for _ in range(3))
        chief.validate(batches, 1.0)
        assert not any(chief.must_stop() for _ in range(3))
    assert chief.num_asked == 2


@pytest.mark.parametrize("is_state_seen", [True, False], ids=["state seen", "signal alone"])
def test_a_signal_stops_a_trial_too(start_trials: StartTrials, is_state_seen: bool) -> None:
    """A master that signals is obeyed and acknowledged, whether or not it says the state."""
    master, (winner, loser) = start_trials(ASHA, signals_stops=True)
    if not is_state_seen:
        fault = Fault(kind="500", method="GET", path="/api/v1/trials/[0-9]+", times=1000)
        master.server.inject(fault)
    winner.validate(20, 1.0)
    assert not winner.must_stop()
    loser.validate(20, 2.0)
    poll_until(lambda: loser.must_stop() and loser.allocation.acked)
    assert bool(loser.core.preempt.reason) == is_state_seen
    loser.exit()
    assert loser.trial.state == "COMPLETED"
    assert len(master.trials) == 3


def test_a_pause_is_a_pause(start_trials: StartTrials) -> None:
    master, (chief, _) = start_trials(ASHA)
    chief.validate(20, 1.0)
    User(master).call("POST", f"/api/v1/experiments/{chief.trial.experiment_id}/pause")
    poll_until(chief.must_stop)
    assert chief.core.preempt.reason == ""
    chief.exit()
    assert chief.allocation.acked
    assert chief.trial.state == "PAUSED"


@pytest.mark.parametrize("name", ["single", "random", "grid"])
def test_searchers_that_stop_no_trial_are_not_asked(start_trials: StartTrials, name: str) -> None:
    searcher = {"name": name, "metric": "validation_loss"}
    if name == "random":
        searcher.update(max_trials=1)
    _, (chief, *_) = start_trials(searcher)
    chief.validate(20, 1.0)
    assert not chief.must_stop()
    assert chief.num_asked == 0


def test_only_the_chief_asks(start_trials: StartTrials, tmp_path: Path) -> None:
    master, (chief, _) = start_trials(ASHA)
    other = SimpleNamespace(rank=1, get_rank=lambda: 1)
    assert isinstance(Chief(master, chief.trial, tmp_path, other).core.preempt, core.PreemptContext)


@pytest.mark.parametrize("kind", ["500", "close", "hang"])
def test_a_master_that_is_away_is_asked_again(
    start_trials: StartTrials,
    kind: FaultKind,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The trial goes on meanwhile; a warning says so, once."""
    monkeypatch.setattr(stops, "PATIENCE_S", 1)
    master, (winner, loser) = start_trials(ASHA)
    winner.validate(20, 1.0)
    assert not winner.must_stop()
    path = f"/api/v1/trials/{loser.trial.id}"
    gate = threading.Event()
    fault = master.server.inject(Fault(kind=kind, method="GET", path=path, times=3, gate=gate))
    if kind != "hang":
        gate.set()
    loser.validate(20, 2.0)
    with caplog.at_level(logging.WARNING, "determined_ds"):
        assert not any(loser.must_stop() for _ in range(3))
        poll_until(loser.must_stop)
    gate.set()
    assert fault.met == 3
    warned = [record for record in caplog.records if "whether the searcher has stopped" in record.message]
    assert len(warned) == 1


def test_between_two_questions_that_fail_there_is_time(
    start_trials: StartTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks wait for each."""
    master, (_, chief) = start_trials(ASHA)
    monkeypatch.setattr(stops, "AGAIN_AFTER_S", 1e6)
    master.server.inject(Fault(kind="500", method="GET", path="/api/v1/trials/[0-9]+", times=1000))
    chief.validate(20, 1.0)
    assert not any(chief.must_stop() for _ in range(5))
    assert chief.num_asked == 1


def test_a_validation_that_the_master_has_not_taken_is_waited_for(
    start_trials: StartTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its searcher has not seen it, so the state says nothing yet."""
    monkeypatch.setattr(stops, "PATIENCE_S", 0.2)
    master, (winner, loser) = start_trials(ASHA)
    winner.validate(20, 1.0)
    assert not winner.must_stop()
    path = f"/api/v1/trials/{loser.trial.id}/metrics"
    gate = threading.Event()
    master.server.inject(Fault(kind="hang", method="POST", path=path, gate=gate))
    loser.validate(20, 2.0)
    assert not loser.must_stop()
    assert loser.num_asked == 0
    gate.set()
    poll_until(loser.must_stop)


def poll_until(is_true: Callable[[], bool]) -> None:
    """Wait for what comes in its own time."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
