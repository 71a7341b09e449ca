"""``det-ds report``: all that is known of runs in one file, that loads nothing and runs nothing from outside."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.browser import chromium
from tests.report.pages import EVIL, Page
from tests.report.recorded import BEGAN, course, launch, recorded, training

COMPLETED = {"status": "completed", "steps_completed": 40, "slots": 2}


def report(*words: str | Path) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def saved(*runs: Path) -> Path:
    path = runs[0].parent / "page.html"
    path.unlink(missing_ok=True)
    done = report(*runs, "--output", path)
    assert done.exit_code == 0, done.output
    return path


def page_of(*runs: Path) -> Page:
    return Page(saved(*runs).read_text())


def as_json(*paths: Path) -> list[dict[str, Any]]:
    done = report(*paths, "--json")
    assert done.exit_code == 0, done.output
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


def test_a_run_says_how_it_ended_what_was_best_and_how_it_was_trained(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", course(40), result=COMPLETED, checkpoints=[20, 40])
    page = page_of(path)
    assert page.texts["title"] == ["gpt2"]
    assert page.texts["p"][0] == "Completed: 40 batches in 40 s; best validation_loss 1.1235 after batch 40."
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts["trained on"] == "2 slots (CPU), ZeRO 1, fp32, global batch 32 = 16 x 1 x 2 replicas"
    assert facts["newest checkpoint"] == "uuid-40, batch 40"
    assert "1.0000 from 4.9000" in page.rows[1]
    assert ["zero_optimization.stage", "1", "zero1.json:6"] in page.rows


def test_there_is_always_a_page(tmp_path: Path) -> None:
    """Of a run that was killed in its first batch, and of one whose loss was never finite."""
    failed = {"status": "failed", "reason": "rank 1 was killed"}
    for name, records, result, said in (
        ("killed", [], failed, "Failed: 0 of 40 batches."),
        ("lost", [training(1, loss=math.nan)], None, "Not finished: 1 of 40 batches in 1 s."),
    ):
        page = page_of(recorded(tmp_path / name, records, result=result))
        assert page.texts["p"][0] == said
        assert not {"None", "nan"} & {cell for cells in page.rows for cell in cells}
        assert ("rank 1 was killed" in page.words) == (name == "killed")


def test_what_came_from_outside_is_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    def hostile(path: Path, text: str) -> Path:
        """A run in which all that comes from outside is this text."""
        given = launch(
            **dict.fromkeys(("name", "runs", "command", "strategy", "reason", "kind"), text),
            hyperparameters={text: text},
            ds_config={text: text},
            origins={text: text},
            versions={text: text},
            machine={"host": text, text: text},
        )
        records = [training(1, **{text: 1.0, "loss": 1.0}), {**training(1, loss=2.0), "group": text}]
        result = {"status": text, "reason": text, "resume": text, "best": {"checkpoint": text}}
        config = {"name": text, "searcher": {"metric": text}, text: text}
        recorded(path, records, launches=[given, given], result=result, config=config)
        return path

    for num in (1, 2):
        evil, plain = (
            page_of(*(hostile(tmp_path / f"{word}{num}" / f"{at}", f"{text} {at}") for at in range(num)))
            for word, text in (("evil", EVIL), ("plain", "plain"))
        )
        evil.check_sealed_like(plain)


def test_each_metric_is_a_curve_over_batches_and_seconds_of_training(tmp_path: Path) -> None:
    """Pauses between launches and lost work are left out; a batch that is reported again counts once."""
    late = BEGAN + 1000
    odd = training(1, loss=math.nan, top=math.inf, per_class=[1, 2], note="text", nothing=None)
    records = [odd, training(10), training(20, loss=1.5), training(20, loss=1.0)]
    launches = [launch(), launch(time=late, kind="resume", steps_completed=20)]
    path = recorded(tmp_path / "run", [*records, training(30, time=late + 5, loss=0.5)], launches=launches)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"group": "training", "steps_comp')
    with (path / "launches.jsonl").open("a") as file:
        file.write('[1]\n{"time": 2.0, "ki')
    (run,) = as_json(path)
    assert list(run["curves"]) == ["training/loss", "training/top"]
    loss = run["curves"]["training/loss"]
    assert (loss["steps"], loss["values"]) == ([1, 20, 30], ["NaN", 1.0, 0.5])
    assert loss["seconds"] == [1.0, 20.0, 25.0]
    assert [each["kind"] for each in run["launches"]] == ["start", "resume"]


def test_a_page_is_in_the_one_folder_that_it_is_of_else_here_and_replaces_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (recorded(tmp_path / name, course(10)) for name in ("one", "two"))
    for _ in range(2):  # once more, over its own
        assert report(one).stdout.startswith("one/report.html  (1 run, 0.")
    assert report(one, two).stdout.startswith("report.html  (2 runs")
    (one / "report.html").write_text("<h1>Mine</h1>")
    done = report(one)
    assert (done.exit_code, "was not written by det-ds report" in done.stderr) == (2, True)
    assert (one / "report.html").read_text() == "<h1>Mine</h1>"
    compared = recorded(tmp_path / "compared/runs/zero0-x2/1", course(10)).parents[2]
    (compared / "results.json").write_text("{}")
    assert report(compared).stdout.startswith("compared/runs.html")


@pytest.mark.usefixtures("browser")
def test_curves_are_drawn_whatever_is_in_them(tmp_path: Path) -> None:
    odd = [*course(40), training(41, loss=math.nan), training(42, loss=math.inf, lr=-1.0)]
    launches = [launch(), launch(time=BEGAN + 20.5, kind="resume", steps_completed=20)]
    page = saved(
        recorded(tmp_path / "one", odd, launches=launches, checkpoints=[20, 40]),
        recorded(tmp_path / "<b>two", course(30), launches=()),
        recorded(tmp_path / "none"),
    )
    dom, complaints = chromium(page.as_uri())
    assert complaints == []
    assert "<canvas" in dom
