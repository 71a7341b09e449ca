"""What a search leaves behind and shows: tables, pictures, and the words for them."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from determined_ds.experiment.space.space import Axis
from determined_ds.search.display import SearchView, TrialView, bar_of, in_words, short_names, table_of
from determined_ds.search.outcome import best_trial, reasons
from determined_ds.search.plots import Subject, draw_history, draw_parallel_coordinates
from determined_ds.search.study import StudyTrial
from tests.command import ROOT

AXES = (
    Axis(path=("lr",), spec={"type": "log", "minval": -4, "maxval": -1, "base": 10}),
    Axis(path=("narrow",), spec={"type": "log", "minval": 0.1, "maxval": 0.2, "base": 10}),
    Axis(path=("ds", "stage"), spec={"type": "categorical", "vals": [0, 1, {"a": "b"}]}),
    Axis(path=("width",), spec={"type": "int", "minval": 1, "maxval": 512}),
    Axis(path=("dropout",), spec={"type": "double", "minval": -1, "maxval": 0.5}),
)


def trial(number: int, status: str, values: dict[int, float], why: str = "") -> StudyTrial:
    point = {"lr": 0.001 * number, "narrow": 1.3, "ds.stage": {"a": "b"}, "width": 8 * number, "dropout": 0.1}
    return StudyTrial(number=number, status=status, values=values, why=why, point=point)


TRIALS = (
    trial(1, "completed", {2: 3.0, 4: 2.0}),
    trial(2, "dropped", {}, "it does not fit"),
    trial(3, "stopped", {2: 2.5}),
    trial(4, "failed", {2: 2.0, 4: math.nan}, "it crashed"),
    trial(5, "dropped", {}, "it does not fit"),
    trial(6, "completed", {2: math.inf}),
)


def test_the_best_is_the_first_of_the_best() -> None:
    best = best_trial(TRIALS, smaller_is_better=True)
    assert best is not None
    assert (best.number, best.best(smaller_is_better=True)) == (1, (4, 2.0))
    best = best_trial(TRIALS, smaller_is_better=False)
    assert best is not None
    assert (best.number, best.best(smaller_is_better=False)) == (1, (2, 3.0))
    assert best_trial([TRIALS[1], TRIALS[5]], smaller_is_better=True) is None


def test_reasons_are_grouped() -> None:
    assert reasons(TRIALS) == ["2 dropped: it does not fit", "1 failed: it crashed"]
    many = [trial(number, "dropped", {}, f"reason {number}") for number in range(20)]
    assert reasons(many)[-1] == "and 12 other reasons, which results.csv has"
    assert len(reasons(many)) == 9


def test_names_are_as_short_as_they_can_be_told_apart() -> None:
    names = ("a.params.lr", "b.params.lr", "zero_optimization.stage", "lr")
    assert list(short_names(names).values()) == ["a.params.lr", "b.params.lr", "stage", "lr"]
    assert in_words({"zero.stage": 3, "lr": 0.00123456, "flag": True}) == "stage 3, lr 0.001235, flag true"


@pytest.mark.parametrize("smaller_is_better", [True, False])
@pytest.mark.parametrize("trials", [TRIALS, TRIALS[:1]], ids=["several", "one"])
def test_pictures_are_drawn_of_whatever_there_is(
    tmp_path: Path, trials: tuple[StudyTrial, ...], smaller_is_better: bool
) -> None:
    subject = Subject(
        title="tiny", metric="loss", smaller_is_better=smaller_is_better, trials=trials, axes=AXES
    )
    draw_history(subject, tmp_path / "history.png")
    draw_parallel_coordinates(subject, tmp_path / "parallel.png")
    for name in ("history.png", "parallel.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_the_better_is_the_darker() -> None:
    for smaller_is_better, best in ((True, 2.0), (False, 3.0)):
        subject = Subject(title="", metric="", smaller_is_better=smaller_is_better, trials=TRIALS, axes=AXES)
        brightness = {value: sum(subject.colour(value)[:3]) for value in (2.0, 2.5, 3.0)}
        assert min(brightness, key=lambda value: brightness[value]) == best


def test_pictures_leave_nothing_in_pyplot() -> None:
    code = "import sys, determined_ds.search.plots; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


# ---------------------------------------------------------------------------------------------- the table


def view(*running: TrialView) -> SearchView:
    return SearchView(
        metric="validation_loss",
        running=running,
        counts={"completed": 3, "stopped": 0, "dropped": 1},
        waiting=2,
        best="validation_loss 2.1, trial 3 after 50 batches",
        slots="2 of 2 slots in use",
    )


def row(state: str = "running", length: int | None = 200) -> TrialView:
    point = "learning_rate 0.001234, train_micro_batch_size_per_gpu 8, zero_optimization.stage 3"
    return TrialView(number=12, point=point, steps=50, length=length, value=2.34567, state=state)


def test_the_table_fits_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(table_of(view(row())))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in ("12", "━━━─────────", "50/200", "2.3457", "learning_rate 0.001234"):
        assert words in text
    assert "best: validation_loss 2.1, trial 3 after 50 batches" in text
    assert "3 completed, 1 dropped, 2 waiting; 2 of 2 slots in use" in text


def test_a_trial_whose_length_is_not_known_has_no_bar() -> None:
    assert bar_of(row(length=None)).strip() == "running"
    assert bar_of(row("stopping")).strip() == "stopping"
