"""``det-ds report``: where the page goes, what ``--json`` has, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import losses
from tests.package import checkpoints


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_the_page_of_a_run_is_in_its_directory(copied: Path) -> None:
    run = copied / "run"
    done = invoke(run)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{run / 'report.html'}  (1 run, 0.")
    assert "tiny" in (run / "report.html").read_text()
    assert invoke(run).exit_code == 0, "once more, over its own"
    (run / "report.html").write_text("<h1>Mine</h1>")
    done = invoke(run)
    assert done.exit_code == EXIT_CONFIG
    assert "was not written by det-ds report" in done.stderr
    assert "--output FILE" in done.stderr
    assert (run / "report.html").read_text() == "<h1>Mine</h1>"


def test_a_damaged_file_of_a_run_is_named(copied: Path) -> None:
    run = copied / "run"
    for name in ("memory.json", "deepspeed_config.json"):
        (run / name).write_text("[1, 2]")
    done = invoke(run)
    assert done.exit_code == 0, done.output
    page = (run / "report.html").read_text()
    for name in ("memory.json", "deepspeed_config.json"):
        assert f"{name} is not a JSON object" in page


def test_the_page_of_several_is_here_or_where_output_says(
    copied: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied)
    assert invoke("run", trained / "run").stdout.startswith("report.html  (2 runs")
    assert invoke("run", trained / "run", "--output", "new/two.html").stdout.startswith("new/two.html")
    assert (copied / "new" / "two.html").is_file()


def test_the_report_of_a_comparison_stays(copied: Path) -> None:
    (copied / "runs/zero0-x2").mkdir(parents=True)
    (copied / "run").rename(copied / "runs/zero0-x2/1")
    (copied / "results.json").write_text("{}")
    (copied / "report.html").write_text("of det-ds compare")
    assert invoke(copied).stdout.startswith(str(copied / "runs.html"))
    assert (copied / "report.html").read_text() == "of det-ds compare"


def test_a_folder_that_is_no_run_is_an_error_with_a_fix(tmp_path: Path) -> None:
    done = invoke(tmp_path / "nowhere")
    assert done.exit_code == EXIT_CONFIG
    assert "does not exist" in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.output


def test_json_has_the_whole_curves_and_writes_no_page(copied: Path) -> None:
    run = copied / "run"
    trained = losses(run)
    record = {"group": "training", "steps_completed": 7, "metrics": {"loss": float("nan")}, "time": 0.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    (found,) = json.loads(invoke(run, "--json").stdout)["runs"]
    assert not (run / "report.html").exists()
    assert found["status"] == "completed"
    assert found["curves"]["training/loss"]["values"] == [*trained.values(), "NaN"]
    best = json.loads((run / "result.json").read_text())["best"]
    assert {key: found["best"][key] for key in ("metric", "value")} == {
        key: best[key] for key in ("metric", "value")
    }
    origin = found["configuration"]["DeepSpeed"]["train_batch_size"]["origin"]
    assert origin.startswith("global_batch_size, ")
    kept = {each["uuid"]: each["steps_completed"] for each in found["checkpoints"]}
    assert kept == {path.name: steps for path, steps in zip(checkpoints(run), (6, 4, 2), strict=True)}
