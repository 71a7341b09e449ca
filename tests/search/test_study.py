"""The study on disk: whatever is told of a search is there, whenever its writer ends; nothing else is taken for one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from determined_ds.errors import ConfigError
from determined_ds.experiment.space.space import Axis, SearchSpace
from determined_ds.search.course import Exited, Validated
from determined_ds.search.methods import Create, make_search
from determined_ds.search.study import STUDY, About, SearchStudy, StudyTrial
from tests.search.test_methods import space_of

SPACE = {
    "lr": {"type": "log", "minval": -3, "maxval": -1, "base": 10},
    "ds": {"stage": {"type": "categorical", "vals": [0, 1]}},
    "kind": {"type": "categorical", "vals": [{"a": 1}, None, [2]]},
    "width": {"type": "int", "minval": 8, "maxval": 64},
    "dropout": {"type": "double", "minval": 0, "maxval": 0.5},
}
ABOUT = About(name="tiny", metric="loss", smaller_is_better=True, search="digest")


def space() -> SearchSpace:
    return space_of(SPACE)


def created(number: int) -> list[Create]:
    search = make_search({"name": "random", "max_trials": number}, space())
    return [action for action in search.start() if isinstance(action, Create)]


def point(create: Create) -> dict[str, Any]:
    hparams = create.hparams
    return {
        **{key: hparams[key] for key in ("lr", "kind", "width", "dropout")},
        "ds.stage": hparams["ds"]["stage"],
    }


def opened(folder: Path, about: About = ABOUT) -> SearchStudy:
    return SearchStudy(folder / STUDY, about, space().axes)


def validated(trial: int, steps: int, loss: float) -> Validated:
    return Validated(trial_id=trial, metrics={"loss": loss, "batches": float(steps)}, steps=steps)


def filled(folder: Path) -> SearchStudy:
    """Four trials: one that was trained, one that was stopped, one that was dropped, one that runs."""
    study = opened(folder)
    for number, create in enumerate(created(4), start=1):
        study.add(number, create, point(create), f"trials/{number:04d}")
    study.started(1)
    study.started(2)
    study.validated(validated(1, 2, 3.0))
    study.ended(Exited(trial_id=3, reason="INVALID_HP"), "dropped", "it does not fit")
    study.validated(validated(2, 2, 4.0))
    study.ended(Exited(trial_id=2), "stopped")
    study.validated(validated(1, 4, 2.5))
    study.validated(validated(1, 6, 2.75))
    study.ended(Exited(trial_id=1), "completed")
    study.started(4)
    study.restarted(4, 1, "it crashed")
    return study


EVENTS = [
    validated(1, 2, 3.0),
    Exited(trial_id=3, reason="INVALID_HP"),
    validated(2, 2, 4.0),
    Exited(trial_id=2),
    validated(1, 4, 2.5),
    validated(1, 6, 2.75),
    Exited(trial_id=1),
]


def told(trials: list[StudyTrial]) -> list[tuple[str, str, int, dict[int, float]]]:
    return [(trial.status, trial.why, trial.restarts, dict(trial.values)) for trial in trials]


KNOWN = [
    ("completed", "", 0, {2: 3.0, 4: 2.5, 6: 2.75}),
    ("stopped", "", 0, {2: 4.0}),
    ("dropped", "it does not fit", 0, {}),
    ("running", "", 1, {}),
]


# --------------------------------------------------------------------------------------- what is kept


def test_a_study_opened_again_knows_all_that_it_was_told(tmp_path: Path) -> None:
    filled(tmp_path)
    again = opened(tmp_path)
    assert again.events() == EVENTS
    assert told(again.trials()) == KNOWN
    assert len(again) == 4
    creates = created(4)
    assert [(trial.point, trial.seed) for trial in again.trials()] == [(point(c), c.seed) for c in creates]
    assert again.trial(1).best(smaller_is_better=True) == (4, 2.5)
    assert again.trial(1).best(smaller_is_better=False) == (2, 3.0)
    assert again.trial(4).best(smaller_is_better=True) is None


def test_optuna_reads_it_as_any_study_of_its_own(tmp_path: Path) -> None:
    filled(tmp_path)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / STUDY))
    study = optuna.load_study(study_name="tiny", storage=optuna.storages.JournalStorage(backend))
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    assert study.best_trial.number == 0
    assert study.best_value == 2.5
    first = study.trials[0]
    assert first.intermediate_values == {2: 3.0, 4: 2.5, 6: 2.75}
    create = created(1)[0]
    expected = {**point(create), "kind": json.dumps(create.hparams["kind"])}
    assert first.params == pytest.approx(expected)
    kinds = {name: type(distribution).__name__ for name, distribution in first.distributions.items()}
    assert kinds == {
        "lr": "FloatDistribution",
        "ds.stage": "CategoricalDistribution",
        "kind": "CategoricalDistribution",
        "width": "IntDistribution",
        "dropout": "FloatDistribution",
    }
    learning_rate = first.distributions["lr"]
    assert isinstance(learning_rate, optuna.distributions.FloatDistribution)
    assert learning_rate.log
    assert (learning_rate.low, learning_rate.high) == pytest.approx((1e-3, 1e-1))


def test_larger_is_better_where_it_is(tmp_path: Path) -> None:
    about = About(name="tiny", metric="loss", smaller_is_better=False, search="digest")
    opened(tmp_path, about)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / STUDY))
    study = optuna.load_study(study_name="tiny", storage=optuna.storages.JournalStorage(backend))
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE


def test_a_metric_that_is_not_finite_is_kept_and_is_never_the_best(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for number, create in enumerate(created(2), start=1):
        study.add(number, create, point(create), f"trials/{number:04d}")
    study.validated(validated(1, 2, float("nan")))
    study.validated(validated(2, 2, float("inf")))
    study.ended(Exited(trial_id=1), "completed")
    study.ended(Exited(trial_id=2), "stopped")
    again = opened(tmp_path)
    assert [trial.status for trial in again.trials()] == ["completed", "stopped"]
    assert [trial.best(smaller_is_better=True) for trial in again.trials()] == [None, None]
    assert [type(event).__name__ for event in again.events()] == ["Validated"] * 2 + ["Exited"] * 2


# ------------------------------------------------------------------------------ a writer that is killed

WRITER = """
import sys
from pathlib import Path
from tests.search import test_study
study = test_study.filled(Path(sys.argv[1]))
steps = 0
while True:
    steps += 1
    study.validated(test_study.validated(4, steps, 1.0 / steps))
    print(steps, flush=True)
"""


def test_what_a_killed_writer_had_told_is_there(tmp_path: Path) -> None:
    """Killed wherever it is, after it said that a validation is written."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        said += [int(line) for line in writer.stdout.read().split()]
    study = opened(tmp_path)  # no process holds it any more
    events = study.events()
    assert events[: len(EVENTS)] == EVENTS
    steps = [event.steps for event in events[len(EVENTS) :] if isinstance(event, Validated)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) in (said[-1], said[-1] + 1)  # the last may have been written, and not said
    assert dict(study.trial(4).values) == {step: 1.0 / step for step in steps}
    study.validated(validated(4, len(steps) + 1, 0.0))  # and it goes on


def cut(folder: Path, num_bytes: int) -> None:
    path = folder / STUDY
    os.truncate(path, path.stat().st_size - num_bytes)


def test_half_a_line_at_the_end_was_never_acted_on_and_is_taken_away(tmp_path: Path) -> None:
    filled(tmp_path)
    cut(tmp_path, 5)
    study = opened(tmp_path)
    assert study.trial(4).restarts == 0
    assert study.events() == EVENTS
    study.restarted(4, 1, "again")
    assert told(opened(tmp_path).trials()) == KNOWN


def test_every_end_of_the_file_leads_to_a_study(tmp_path: Path) -> None:
    """Cut after each of its lines: what follows from an event is there as soon as the event is."""
    filled(tmp_path)
    lines = (tmp_path / STUDY).read_bytes().splitlines(keepends=True)
    for end in range(len(lines)):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / STUDY).write_bytes(b"".join(lines[:end]) + lines[end][: len(lines[end]) // 2])
        study = opened(folder)
        events = study.events()
        assert events == EVENTS[: len(events)]
        ended = {event.trial_id for event in events if isinstance(event, Exited)}
        done = {trial.number for trial in study.trials() if trial.ended}
        assert done == ended
        values = [len(trial.values) for trial in study.trials()]
        assert sum(values) == sum(isinstance(event, Validated) for event in events)


def test_a_lock_that_a_killed_writer_left_holds_nobody_up(tmp_path: Path) -> None:
    filled(tmp_path)
    os.symlink(tmp_path / STUDY, tmp_path / f"{STUDY}.lock")
    study = opened(tmp_path)
    study.restarted(4, 2, "again")
    assert study.trial(4).restarts == 2


# ------------------------------------------------------------------------------------ files that are none


def refused(folder: Path, about: About = ABOUT) -> str:
    before = (folder / STUDY).read_bytes()
    with pytest.raises(ConfigError) as caught:
        opened(folder, about)
    assert (folder / STUDY).read_bytes() == before  # it may be somebody's
    text = str(caught.value)
    assert str(folder / STUDY) in text
    assert "fix: " in text
    return text


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    for content in (
        b"hello\nthere\n",
        b"hello",
        b"[1, 2]\n",
        b'{"a": 1}\n',
        bytes(range(128, 255)) * 9 + b"\n",
    ):
        (tmp_path / STUDY).write_bytes(content)
        assert "is not a study file" in refused(tmp_path)


def test_a_line_that_is_not_what_was_written(tmp_path: Path) -> None:
    filled(tmp_path)
    lines = (tmp_path / STUDY).read_bytes().splitlines(keepends=True)
    lines[6] = lines[6][:20] + b"\n"
    (tmp_path / STUDY).write_bytes(b"".join(lines))
    assert f"is damaged: line 7 of {len(lines)}" in refused(tmp_path)


def test_lines_that_are_missing(tmp_path: Path) -> None:
    filled(tmp_path)
    lines = (tmp_path / STUDY).read_bytes().splitlines(keepends=True)
    told_at = next(number for number, line in enumerate(lines) if b"event 000002" in line)
    (tmp_path / STUDY).write_bytes(b"".join(lines[:told_at] + lines[told_at + 1 :]))
    assert "is damaged: events are missing" in refused(tmp_path)
    (tmp_path / STUDY).write_bytes(b"".join(lines[1:]))
    assert "is damaged: it does not begin with a study" in refused(tmp_path)


def test_fields_that_are_missing(tmp_path: Path) -> None:
    filled(tmp_path)
    lines = (tmp_path / STUDY).read_bytes().splitlines(keepends=True)
    create = json.loads(lines[2])
    del create["study_id"]
    (tmp_path / STUDY).write_bytes(b"".join([*lines[:2], json.dumps(create).encode() + b"\n", *lines[3:]]))
    assert "is damaged: Optuna cannot read it (KeyError)" in refused(tmp_path)


def test_a_study_of_somebody_else(tmp_path: Path) -> None:
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / STUDY))
    study = optuna.create_study(study_name="tiny", storage=optuna.storages.JournalStorage(backend))
    study.add_trial(optuna.create_trial(value=1.0))
    assert "is an Optuna study, and not one of a det-ds search" in refused(tmp_path)


def test_a_study_of_another_search(tmp_path: Path) -> None:
    filled(tmp_path)
    other = About(name="other", metric="loss", smaller_is_better=True, search="another digest")
    assert "is of another search, tiny, than" in refused(tmp_path, other)


def test_categories_that_python_takes_for_equal_are_told_apart(tmp_path: Path) -> None:
    axis = Axis(path=("x",), spec={"type": "categorical", "vals": [1, True, "1"]})
    study = SearchStudy(tmp_path / STUDY, ABOUT, (axis,))
    for number, value in enumerate([1, True, "1"], start=1):
        study.add(number, Create(hparams={"x": value}, seed=number), {"x": value}, "")
    again = SearchStudy(tmp_path / STUDY, ABOUT, (axis,))
    assert [repr(trial.point["x"]) for trial in again.trials()] == ["1", "True", "'1'"]
