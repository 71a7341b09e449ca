"""``det-ds new --experiment``: what is asked, what is written, and what is not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from determined_ds import load_deepspeed_config, load_experiment
from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import ROOT

FLAGS = {
    "--parameters": "6B",
    "--slots": "32",
    "--gpu-memory": "80GiB",
    "--global-batch-size": "64",
    "--sequence-length": "2048",
}
NAME = "6b_zero1_32gpu"
YAML = f"experiments/{NAME}.yaml"
JSON = f"experiments/deepspeed/{NAME}.json"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A context directory with GPT-2's trial in it, and in it we are."""
    (tmp_path / "model_defs" / "gpt2").mkdir(parents=True)
    shutil.copy(ROOT / "model_defs" / "gpt2" / "trial.py", tmp_path / "model_defs" / "gpt2" / "trial.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*more: str, **flags: str | None) -> Result:
    """With the flags above, changed as asked; None leaves one out."""
    name = [flags.pop("name")] if "name" in flags else []
    given = {**FLAGS, **{"--" + name.replace("_", "-"): value for name, value in flags.items()}}
    words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    return CliRunner().invoke(main, ["new", *name, "--experiment", *words, *more])


def written(context: Path) -> set[str]:
    found = {str(path.relative_to(context)) for path in context.rglob("*") if path.is_file()}
    return found - {"model_defs/gpt2/trial.py"}


def refused(result: Result, *said: str) -> None:
    assert result.exit_code == EXIT_CONFIG, result.output
    for part in said:
        assert part in result.stderr
    assert "Traceback" not in result.output
    assert "  fix: " in result.stderr
    assert result.stdout == ""


# ------------------------------------------------------------------------------------------------------- writing


def test_what_is_written_was_chosen_from_a_table_and_is_written_alike_again(context: Path) -> None:
    result = start("--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert written(context) == {YAML, JSON}
    assert f"wrote {YAML}\nwrote {JSON}\nnext: det-ds check {YAML}\n" in result.stdout
    rows = re.findall(r"^(ZeRO \d\S*(?: recomputed)?)( \*)? .* (yes|no) ", result.stdout, re.MULTILINE)
    assert ("ZeRO 0", "", "no") in rows
    assert [row for row in rows if row[1]] == [("ZeRO 1", " *", "yes")]
    experiment = load_experiment(Path(YAML))
    assert (experiment.name, experiment.slots) == (NAME, 32)
    assert experiment.hyperparameters.get(("deepspeed_config",)) == JSON
    config = load_deepspeed_config(JSON)
    assert config["zero_optimization"] == {"stage": 1}
    assert config["bf16"] == {"enabled": True}
    assert config["train_micro_batch_size_per_gpu"] == 2
    before = Path(YAML).read_bytes(), Path(JSON).read_bytes()
    assert start("--precision", "bf16", "--force").exit_code == 0
    assert (Path(YAML).read_bytes(), Path(JSON).read_bytes()) == before


@pytest.mark.parametrize(
    "flags",
    [
        {"pipe_parallel_size": "4"},
        {"offload": "nvme", "nvme_path": "/local_nvme"},
        {"parameters": "124M", "slots": "2", "precision": "fp16"},
        {"parameters": "70B"},
    ],
    ids=str,
)
def test_check_passes_it(flags: dict[str, str], context: Path) -> None:
    result = start(name="it", **flags)
    assert result.exit_code == 0, result.output
    files = ["experiments/it.yaml", "experiments/deepspeed/it.json"]
    checked = CliRunner().invoke(main, ["check", *files, "--strict"], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output
    trial = "GPT2PipelineTrial" if "pipe_parallel_size" in flags else "GPT2Trial"
    assert load_experiment(Path("experiments/it.yaml")).trial == f"model_defs.gpt2.trial:{trial}"


def test_the_files_go_where_it_is_asked(context: Path) -> None:
    result = start("-o", "elsewhere", "mine", "--entrypoint", "mine_trial:Mine")
    assert result.exit_code == 0, result.output
    files = {"elsewhere/experiments/mine.yaml", "elsewhere/experiments/deepspeed/mine.json"}
    assert written(context) == files
    assert "next: det-ds check elsewhere/experiments/mine.yaml --context elsewhere" in result.stdout
    experiment = load_experiment(Path("elsewhere/experiments/mine.yaml"))
    assert experiment.hyperparameters.get(("deepspeed_config",)) == "experiments/deepspeed/mine.json"
    assert "warning: entrypoint = 'mine_trial:Mine'" in result.stderr  # it is not written yet
    assert "the context directory has no module mine_trial" in result.stderr


@pytest.mark.parametrize("code", ["train.py --epochs 3", "python3 train.py --epochs 3"])
def test_a_script_is_an_entrypoint_too(code: str, context: Path) -> None:
    Path("train.py").write_text("import determined_ds\n")
    result = start("--entrypoint", code, "mine")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "train.py --epochs 3" in load_experiment(Path("experiments/mine.yaml")).config["entrypoint"]


# ------------------------------------------------------------------------------------------------------- refused


def test_a_file_that_is_there_is_kept(context: Path) -> None:
    Path(JSON).parent.mkdir(parents=True)
    Path(JSON).write_text("mine")
    refused(start(), f"{JSON}: is there already", "give --force to replace it")
    assert written(context) == {JSON}
    assert Path(JSON).read_text() == "mine"
    assert start("--force").exit_code == 0
    assert written(context) == {YAML, JSON}
    assert Path(JSON).read_text() != "mine"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"parameters": "6X"}, "--parameters = '6X'"),
        ({"offload": "cpu", "pipe_parallel_size": "4"}, "leave out --offload"),
        ({"global_batch_size": "70"}, "use --global-batch-size 64 or 96"),
        ({"pipe_parallel_size": "3"}, "use --slots 30 or 33, or --pipe-parallel-size 2"),
        ({"offload": "nvme"}, "--nvme-path: missing"),
        ({"parameters": "175B"}, "no strategy fits 32 GPUs of 80 GiB"),
        ({"name": "../up"}, "NAME = '../up': is not a valid file name"),
        ({"entrypoint": "my_trial"}, "--entrypoint = 'my_trial': is neither MODULE:CLASS nor a script"),
        ({"output": "file"}, "cannot be written"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused(flags: dict[str, str], said: str, context: Path) -> None:
    Path("file").touch()
    refused(start(**flags), said)
    assert written(context) == {"file"}


# ------------------------------------------------------------------------------------------------------- prompts


def test_without_a_terminal_every_missing_flag_is_named(context: Path) -> None:
    result = CliRunner().invoke(main, ["new", "--experiment"])
    refused(result, *(f"error: {flag}: missing" for flag in FLAGS))
    assert result.stderr.count("error: ") == len(FLAGS)
