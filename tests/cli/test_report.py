"""``det-ds report``: where the page goes, what is printed, what is refused."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.report.recorded import course, recorded, training


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_the_page_of_a_run_is_in_its_directory(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", course(10))
    done = invoke(run)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{run / 'report.html'}  (1 run, 0.")
    assert "gpt2" in (run / "report.html").read_text()
    assert invoke(run).exit_code == 0  # once more, over its own


def test_the_page_of_several_is_here_or_where_output_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        recorded(tmp_path / name, course(10))
    assert invoke("one", "two").stdout.startswith("report.html  (2 runs")
    assert invoke("one", "two", "--output", "new/two.html").stdout.startswith("new/two.html")
    assert (tmp_path / "new" / "two.html").is_file()


def test_no_file_of_somebody_else_is_replaced(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", course(10))
    (run / "report.html").write_text("<h1>Mine</h1>")
    done = invoke(run)
    assert done.exit_code == EXIT_CONFIG
    assert "was not written by det-ds report" in done.stderr
    assert "--output FILE" in done.stderr
    assert (run / "report.html").read_text() == "<h1>Mine</h1>"


def test_the_report_of_a_comparison_stays(tmp_path: Path) -> None:
    recorded(tmp_path / "runs" / "zero0-x2" / "1", course(10))
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "report.html").write_text("of det-ds compare")
    assert invoke(tmp_path).stdout.startswith(str(tmp_path / "runs.html"))


def test_a_folder_that_is_no_run_is_an_error_with_a_fix(tmp_path: Path) -> None:
    done = invoke(tmp_path / "nowhere")
    assert done.exit_code == EXIT_CONFIG
    assert "does not exist" in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.output


def test_json_has_the_whole_curves_and_writes_no_page(tmp_path: Path) -> None:
    records = [*course(10), training(11, loss=float("nan"))]
    run = recorded(tmp_path / "run", records, result={"status": "failed"}, checkpoints=[10])
    done = invoke(run, "--json")
    (found,) = json.loads(done.stdout)["runs"]
    assert not (run / "report.html").exists()
    assert found["status"] == "failed"
    assert found["curves"]["training/loss"]["values"][-1] == "NaN"
    assert found["best"] == {"metric": "validation_loss", "value": 4.123456789, "steps": 10}
    assert (
        found["configuration"]["DeepSpeed"]["train_batch_size"]["origin"] == "global_batch_size, gpt2.yaml:11"
    )
    assert found["checkpoints"] == [{"uuid": "uuid-10", "steps_completed": 10}]


def test_open_says_where_the_page_is_without_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address))
    run = recorded(tmp_path / "run", course(10))
    done = invoke(run, "--open")
    assert opened == [(run / "report.html").as_uri()]
    assert f"the page is {opened[0]}" in done.stderr
