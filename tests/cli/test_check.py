"""``det-ds check`` as a command: what it says, in which form, with which exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from tests.command import ROOT

TEMPLATES = [
    *sorted(ROOT.glob("experiments/*/*.yaml")),
    *sorted(ROOT.glob("experiments/*/*.json")),
]
KEYS = {"file", "line", "column", "severity", "code", "key", "message", "fix"}


def check(*arguments: str | Path, colour: bool = False) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)], color=colour)


def found(*arguments: str | Path) -> dict[str, Any]:
    """What ``--json`` says."""
    result: dict[str, Any] = json.loads(check(*arguments, "--json").stdout)
    return result


def findings(*arguments: str | Path) -> list[dict[str, Any]]:
    return [finding for file in found(*arguments)["files"] for finding in file["findings"]]


def setting(**values: Any) -> list[str]:
    """``--set`` for hyperparameters."""
    return [word for key, value in values.items() for word in ("--set", f"hyperparameters.{key}={value}")]


@pytest.fixture(autouse=True)
def here(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a copy of ``own_model``, all clean."""
    monkeypatch.chdir(own_model)
    return own_model


def write(file: str, /, **changes: Any) -> str:
    """A file like ``experiment.yaml``; a hyperparameter by its name, all else by its section. None: without it."""
    data = yaml.safe_load(Path("experiment.yaml").read_text())
    for key, value in changes.items():
        section = data if key in data else data["hyperparameters"]
        section.pop(key, None)
        if value is not None:
            section[key] = value
    Path(file).write_text(json.dumps(data, indent=2) if file.endswith(".json") else yaml.safe_dump(data))
    return file


def grid(**axes: list[Any]) -> str:
    changes = {name: {"type": "categorical", "vals": values} for name, values in axes.items()}
    return write("grid.yaml", searcher={"name": "grid", "metric": "validation_loss"}, **changes)


# ------------------------------------------------------------------------------------------ exit codes, form


WARNED = setting(learning_rate=0.5)  # the DeepSpeed JSON states another, and wins
WRONG = setting(global_batch_size=9)  # on two slots


@pytest.mark.parametrize(
    ("arguments", "code", "strictly", "last_line"),
    [
        ([], 0, 0, "1 file checked, nothing to fix"),
        (WARNED, 0, 1, "0 errors, 1 warning in 1 file"),
        (WRONG, 2, 2, "1 error, 0 warnings in 1 file"),
        ([*WARNED, *WRONG], 2, 2, "1 error, 1 warning in 1 file"),
    ],
    ids=["clean", "warnings", "errors", "warnings stand beside errors"],
)
def test_exit_code_and_summary(arguments: list[str], code: int, strictly: int, last_line: str) -> None:
    result = check("experiment.yaml", *arguments)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (code, last_line)
    assert check("experiment.yaml", *arguments, "--strict").exit_code == strictly
    assert check("experiment.yaml", *arguments, "--strict", "--json").exit_code == strictly


def test_a_metric_that_cannot_be_known_is_a_note_and_counts_as_nothing() -> None:
    trial = Path("trial.py")
    trial.write_text(trial.read_text().replace("-> torch.Tensor:", "-> Any:"))
    metric = ["--set", "searcher.metric=validation_accuracy"]
    result = check("experiment.yaml", *metric, "--strict")
    assert result.exit_code == 0
    assert ": note: searcher.metric = 'validation_accuracy'" in result.stdout
    assert "could not check whether TinyTrial reports it" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 file checked, nothing to fix"
    assert [finding["severity"] for finding in findings("experiment.yaml", *metric)] == ["note"]
    assert [found("experiment.yaml", *metric)[kind] for kind in ("errors", "warnings")] == [0, 0]
    trial.write_text(
        trial.read_text().replace("Trial):", 'Trial):\n    validation_metrics = ("validation_accuracy",)\n')
    )
    assert findings("experiment.yaml", *metric) == []


def test_it_reads_as_a_compiler_does() -> None:
    write("wrong.yaml", global_batch_size=9)
    line = next(
        n for n, text in enumerate(Path("wrong.yaml").read_text().splitlines(), 1) if "batch_size" in text
    )
    result = check("wrong.yaml")
    assert result.stdout.splitlines() == [
        f"wrong.yaml:{line}:3: error: hyperparameters.global_batch_size = 9: "
        "is not a multiple of data_parallel_world_size 2 (2 slots) [batch]",
        "    fix: use global_batch_size 8 or 10",
        "1 error, 0 warnings in 1 file",
    ]
    assert result.stderr == ""


def test_colours_are_for_terminals() -> None:
    assert "\x1b[" not in check("experiment.yaml", *WRONG).output
    assert "\x1b[" in check("experiment.yaml", *WRONG, colour=True).output
    assert "\x1b[" not in check("experiment.yaml", *WRONG, "--json", colour=True).output


def test_a_finding_stays_on_its_line() -> None:
    Path("keys.yaml").write_text(Path("experiment.yaml").read_text() + '"two\\nlines \\e[31m": 1\n')
    (line,) = [line for line in check("keys.yaml").stdout.splitlines() if "unknown key" in line]
    assert r"error: two\nlines \x1b[31m" in line


def test_json_says_the_same() -> None:
    told = found("experiment.yaml", "ds.json", *WRONG)
    assert {key: told[key] for key in ("version", "errors", "warnings")} == {
        "version": 1,
        "errors": 1,
        "warnings": 0,
    }
    assert [(file["file"], file["kind"]) for file in told["files"]] == [
        ("experiment.yaml", "experiment"),
        ("ds.json", "deepspeed"),
    ]
    (finding,) = told["files"][0]["findings"]
    assert finding.keys() >= KEYS
    assert (finding["severity"], finding["code"], finding["value"]) == ("error", "batch", 9)
    assert finding["key"] == "hyperparameters.global_batch_size"
    assert finding["origin"] == "--set hyperparameters.global_batch_size=9"
    assert finding["fix"] == "use global_batch_size 8 or 10"


# ------------------------------------------------------------------------------------------------- files


def test_each_file_by_itself() -> None:
    Path("stage.json").write_text('{\n  "zero_optimization": {\n    "stagee": 1\n  }\n}\n')
    write("experiment.json", global_batch_size=9)  # Determined reads JSON, too
    result = check("experiment.yaml", "stage.json", "experiment.json", "nothing.yaml", "ds.json")
    assert result.exit_code == 2
    said = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    starts = ("stage.json:3:5: error: ", "experiment.json:", "nothing.yaml:1:1: error: no such file")
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=False)), said
    assert said[-1] == "3 errors, 0 warnings in 5 files"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.yaml", None, "no such file"),
        ("binary.json", bytes(range(128, 256)), "is not UTF-8 text (byte 0)"),
    ],
)
def test_what_cannot_be_read_is_said(name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    result = check(name)
    assert (result.exit_code, result.stderr) == (2, "")
    assert f"{name}:1:1: error: {message} [unreadable]" in result.stdout
    (finding,) = findings(name)
    assert finding["fix"]


# ----------------------------------------------------------------------------------------------- options


def test_slots_and_set_are_laid_over_every_file() -> None:
    write("other.yaml", name="other")
    assert {f["file"] for f in findings("experiment.yaml", "other.yaml", "--slots", 3)} == {
        "experiment.yaml",
        "other.yaml",
    }
    assert findings("experiment.yaml", "--slots", 3, *setting(global_batch_size=9)) == []
    (finding,) = findings("experiment.yaml", "--slots", 0)
    assert (finding["key"], finding["origin"]) == ("resources.slots_per_trial", "--slots")
    assert findings("experiment.yaml", "--set", "nonsense")[0]["message"] == "is not KEY=VALUE"


def test_the_context_is_the_folder_that_has_the_trial(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("deep/er").mkdir(parents=True)
    experiment = shutil.copy("experiment.yaml", "deep/er/experiment.yaml")
    assert findings(experiment) == []  # the current folder has it
    away = here.parent / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    assert findings(here / experiment) == []  # the nearest above the file has it
    (finding,) = [f for f in findings(here / experiment, "--context", away) if f["code"] == "entrypoint"]
    assert "no module trial" in finding["message"]
    assert findings(here / experiment, "--context", here) == []


def test_a_folder_that_comes_last_is_the_context_as_in_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments = [
        here / "experiment.yaml",
        Path(shutil.copy(here / "experiment.yaml", here / "second.yaml")),
    ]
    assert check("experiment.yaml", ".").stdout == check("experiment.yaml").stdout
    away = here.parent / "elsewhere"
    away.mkdir()
    monkeypatch.chdir(away)
    report = json.loads(check(*experiments, ".", "--json").stdout)
    assert [file["file"] for file in report["files"]] == [str(each) for each in experiments]
    for file in report["files"]:
        assert "entrypoint" in [finding["code"] for finding in file["findings"]]  # the folder has no trial
    assert findings(*experiments, here) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment.yaml", "one", "two"], ["'one and two': are folders", "CONFIG ... CONTEXT_DIR"]),
        (["experiment.yaml", "one", "--context", "two"], ["'one and two': are folders"]),
        (["one", "experiment.yaml"], ["'one': is a folder", "the folder comes last"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_folders_that_are_no_context_are_refused_by_name(arguments: list[str], words: list[str]) -> None:
    Path("one").mkdir()
    Path("two").mkdir()
    result = check(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--context", "nowhere"],
        ["--context", "ds.json"],
        ["--gpu-memory", "lots"],
        ["--slots", "x"],
        ["--what"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_checks_nothing(arguments: list[str]) -> None:
    result = check("experiment.yaml", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert arguments[0] in result.stderr


def test_quantized_communication_is_cudas() -> None:
    quantized = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    name = write("quantized.yaml", overwrite_deepspeed_args=quantized)
    assert findings(name) == []
    (finding,) = findings(name, "--accelerator", "cpu")
    assert (finding["severity"], finding["code"]) == ("error", "zeropp-quantized-cuda")


def test_what_does_not_fit_a_gpu_is_told_with_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    large = ["experiments/gpt2/const.yaml", "--gpu-memory", "4GiB", *setting(global_batch_size=4096)]
    (finding,) = findings(*large)
    assert (finding["severity"], finding["code"]) == ("error", "memory")
    fix = re.fullmatch(r"set train_micro_batch_size_per_gpu to (\d+) \(at most \d+ fit\)", finding["fix"])
    assert fix
    fixed = {"overwrite_deepspeed_args.train_micro_batch_size_per_gpu": fix[1]}
    assert check(*large, *setting(**fixed)).exit_code == 0


@pytest.mark.parametrize(
    ("described", "severity", "code"),
    [({}, "error", "memory"), ({"model_config": "null"}, "warning", "unknown-model")],
)
def test_a_script_is_held_against_a_gpu_by_the_model_that_it_describes(
    described: dict[str, str], severity: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing describes it, a warning says that nothing was checked."""
    monkeypatch.chdir(ROOT)
    (finding,) = findings(
        "experiments/hf_trainer/const.yaml", "--gpu-memory", "600MiB", *setting(**described)
    )
    assert (finding["severity"], finding["code"]) == (severity, code)


# ------------------------------------------------------------------------------------------ what is found


def test_a_script_of_ones_own_is_left_alone() -> None:
    own = {"entrypoint": "python3 train.py", "global_batch_size": None, "deepspeed_config": None, "fit": None}
    name = write("own.yaml", **own, learning_rate={"type": "double", "minval": 0, "maxval": 1})
    Path("train.py").write_text("metrics = dict(validation_loss=0)")
    found = {(finding["severity"], finding["code"]) for finding in findings(name)}
    assert found == {("note", "left-open"), ("warning", "search-single")}


def test_points_that_cannot_run_are_passed_over_by_the_search() -> None:
    name = grid(global_batch_size=[8, 9, 10], width=[1, 2])
    result = check(name)
    assert result.exit_code == 0
    assert "    points: all 2 points with global_batch_size = 9; 33 % of the 6\n" in result.stdout
    assert f"{name}: 4 of 6 points can run\n" in result.stdout
    told = found(name)["files"][0]
    assert told["points"] == {"checked": 6, "runnable": 4, "size": 6}
    (finding,) = told["findings"]
    assert finding["severity"] == "warning"
    assert finding["points"] == {
        "count": 2,
        "share": pytest.approx(1 / 3),
        "of": 6,
        "exact": True,
        "where": "all 2 points with global_batch_size = 9",
    }


def test_a_search_without_a_point_that_can_run_is_an_error() -> None:
    name = grid(global_batch_size=[9, 11], width=[1, 2])
    assert check(name).exit_code == 2
    told = found(name)["files"][0]
    assert told["points"]["runnable"] == 0
    assert {finding["severity"] for finding in told["findings"]} == {"error"}


def test_what_would_be_sent_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("TOKEN=1\n")
    write("other.yaml", name="other")
    told = found("experiment.yaml", "other.yaml")
    assert [file["kind"] for file in told["files"]] == ["experiment", "experiment", "context"]
    (secret,) = told["files"][2]["findings"]
    assert (secret["severity"], secret["code"], secret["file"]) == ("warning", "secret", ".env")
    monkeypatch.setattr("determined_ds.check.sent_files.MAX_CONTEXT_BYTES", 1000)
    (large, *_) = found("experiment.yaml")["files"][1]["findings"]
    assert (large["severity"], large["code"]) == ("error", "context-too-large")
    assert all(file["kind"] == "deepspeed" for file in found("ds.json")["files"])  # nothing of it is sent


# -------------------------------------------------------------------------------- this repository, the hook


def test_the_hook_checks_every_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (hook,) = yaml.safe_load(Path(".pre-commit-hooks.yaml").read_text())
    every = [Path(folder, file) for folder, _, files in os.walk("experiments") for file in files]
    hooked = [file for file in every if re.search(hook["files"], file.as_posix())]
    assert {ROOT / file for file in hooked} == set(TEMPLATES)
    program, *arguments = shlex.split(hook["entry"])
    assert program == "det-ds"
    result = CliRunner().invoke(main, [*arguments, *map(str, hooked[:2])])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "2 files checked, nothing to fix")
