"""``det-ds check`` as a command: what it says, in which form, with which exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from tests.harness.checked import findings

GOOD = "experiment.yaml"


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


@pytest.fixture(autouse=True)
def here(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a copy of ``own_model``, all clean."""
    monkeypatch.chdir(own_model)
    return own_model


def write(file: str, **changes: Any) -> str:
    """A file like the good one; a hyperparameter by its name, all else by its section."""
    data = yaml.safe_load(Path(GOOD).read_text())
    for key, value in changes.items():
        (data if key in data else data["hyperparameters"])[key] = value
    Path(file).write_text(yaml.safe_dump(data))
    return file


WARNED = ["--set", "hyperparameters.learning_rate=0.5"]  # the DeepSpeed JSON states another, and wins
WRONG = ["--set", "hyperparameters.global_batch_size=9"]  # on two slots
# Its code decides.
NOTED = ["--set", "entrypoint=python3 trial.py", "--set", "hyperparameters.deepspeed_config=null"]


@pytest.mark.parametrize(
    ("arguments", "code", "strictly", "summary"),
    [
        (NOTED, 0, 0, "1 file checked, nothing to fix"),
        (WARNED, 0, 1, "0 errors, 1 warning in 1 file"),
        ([*WARNED, *WRONG], 2, 2, "1 error, 1 warning in 1 file"),
    ],
    ids=["a note", "warnings", "errors beside warnings"],
)
def test_exit_code_and_summary(arguments: list[str], code: int, strictly: int, summary: str) -> None:
    result = check(GOOD, *arguments)
    assert (result.exit_code, summary in result.stdout.splitlines()) == (code, True)
    assert check(GOOD, *arguments, "--strict", "--json").exit_code == strictly


def test_it_reads_as_a_compiler_does_and_json_says_the_same() -> None:
    lines = Path(write("wrong.yaml", global_batch_size=9)).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "batch_size" in text)
    key, fix = "hyperparameters.global_batch_size", "use global_batch_size 8 or 10"
    message = "is not a multiple of data_parallel_world_size 2 (2 slots)"
    said = check("wrong.yaml").stdout
    assert said.startswith(f"wrong.yaml:{line}:3: error: {key} = 9: {message} [batch]\n    fix: {fix}\n")
    files = json.loads(check("wrong.yaml", "ds.json", "--json").stdout)["files"]
    assert [file["kind"] for file in files] == ["experiment", "deepspeed"]
    place = {"file": "wrong.yaml", "line": line, "column": 3, "origin": f"wrong.yaml:{line}"}
    problem = {"severity": "error", "code": "batch", "key": key, "value": 9, "message": message, "fix": fix}
    assert files[0]["findings"] == [{**place, **problem}]


def test_the_context_is_the_folder_that_has_the_trial(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("deep/er").mkdir(parents=True)
    assert findings(shutil.copy(GOOD, "deep/er/experiment.yaml")) == []  # the current folder has it
    away = here.parent / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    experiment = here / "deep/er/experiment.yaml"
    assert findings(experiment) == []  # the nearest above the file has it
    assert "no module trial" in "".join(each.message for each in findings(experiment, away))
    assert findings(experiment, here) == [], "as in run, a folder that comes last"
