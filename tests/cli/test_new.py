"""``det-ds new`` writes what runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.check.files import check_files
from determined_ds.cli.main import main
from determined_ds.scaffold.files import KINDS
from tests.command import ROOT, det_ds


def new(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["new", *arguments, "-o", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = new(tmp_path, "mine", "--kind", kind)
    monkeypatch.chdir(tmp_path)
    files = [*Path("experiments").glob("*/*.yaml"), *Path("experiments").glob("*/*.json")]
    assert [report.findings for report in check_files(files)] == [()] * len(files)
    assert str(tmp_path / "experiments/mine/const.yaml") in said
    arguments = ["run", "experiments/mine/const.yaml", ".", "--test", "--run-dir", tmp_path / "run"]
    done = det_ds(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test passed: " in done.stdout


def test_what_it_writes_keeps_the_style_of_the_house(tmp_path: Path) -> None:
    for kind in KINDS:
        new(tmp_path, f"my_{kind.replace('-', '_')}", "--kind", kind)
    for command in (["check"], ["format", "--check"]):
        words = [
            sys.executable,
            "-m",
            "ruff",
            *command,
            "--config",
            str(ROOT / "pyproject.toml"),
            str(tmp_path),
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    new(tmp_path, "mine")
    trial = tmp_path / "model_defs/mine/trial.py"
    trial.write_text("mine\n")
    result = CliRunner().invoke(main, ["new", "mine", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "--force" in result.output
    assert trial.read_text() == "mine\n"
    new(tmp_path, "mine", "--force")
    assert trial.read_text() != "mine\n"


def test_a_json_that_is_there_stays(tmp_path: Path) -> None:
    own = tmp_path / "experiments/deepspeed/zero1.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    new(tmp_path, "mine")
    assert own.read_text() == "{}"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("My-Model", "use my_model"),
        ("class", "use model_class"),
        ("7b", "use model_7b"),
        ("", "use my_model"),
        ("ä", "use my_model"),
    ],
)
def test_a_name_that_python_cannot_import(tmp_path: Path, name: str, fix: str) -> None:
    result = CliRunner().invoke(main, ["new", name, "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert fix in result.output
    assert list(tmp_path.iterdir()) == []
