"""``det-ds generate``: what is asked, what is written, and what is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli import generate
from determined_ds.cli.main import main
from determined_ds.config.deepspeed.files import load_deepspeed_config
from determined_ds.errors import EXIT_CONFIG
from determined_ds.experiment.experiment import load_experiment
from tests.command import ROOT

FLAGS = {
    "--model-size": "6B",
    "--gpus": "32",
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


def start(*more: str, answers: str | None = None, **flags: str | None) -> Result:
    """With the issue's flags, changed as asked; None leaves one out."""
    given = {**FLAGS, **{"--" + name.replace("_", "-"): value for name, value in flags.items()}}
    words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    return CliRunner().invoke(main, ["generate", *words, *more], input=answers)


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


def test_ranks_share_sequences_where_the_trials_source_says_that_it_takes_slices(context: Path) -> None:
    few = {"model_size": "355M", "gpus": "8", "global_batch_size": "2", "sequence_length": "1024"}
    result = start(**few)
    assert result.exit_code == 0, result.output
    assert "sequence_parallel_size: 4 ranks to a sequence\n  a step has 2 sequences" in result.stdout
    experiment = load_experiment(Path("experiments/355m_zero0_sequence4_8gpu.yaml"))
    assert experiment.hyperparameters.get(("sequence_parallel_size",)) == 4
    trial = context / "model_defs" / "gpt2" / "trial.py"
    trial.write_text(trial.read_text().replace("    sequence_parallel = True\n", ""))
    refused(start(**few, name="whole"), "must be a multiple of the 8 replicas")


def test_the_example_of_the_issue(context: Path) -> None:
    result = start("--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert written(context) == {YAML, JSON}
    assert f"wrote {YAML}\nwrote {JSON}\nnext: det-ds check {YAML}\n" in result.stdout
    assert "zero_optimization.stage: ZeRO 1\n  a rank needs" in result.stdout
    assert "64 samples / 32 replicas = 2 each" in result.stdout
    experiment = load_experiment(Path(YAML))
    assert (experiment.name, experiment.slots) == (NAME, 32)
    assert experiment.hyperparameters.get(("deepspeed_config",)) == JSON
    config = load_deepspeed_config(JSON)
    assert config["zero_optimization"] == {"stage": 1}
    assert config["bf16"] == {"enabled": True}
    assert config["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"pipeline": "4"},
        {"offload": "cpu"},
        {"offload": "nvme", "nvme_path": "/local_nvme"},
        {"model_size": "124M", "gpus": "2", "precision": "fp16"},
        {"model_size": "70B"},
    ],
    ids=str,
)
def test_check_passes_it(flags: dict[str, str], context: Path) -> None:
    result = start("--name", "it", **flags)
    assert result.exit_code == 0, result.output
    files = ["experiments/it.yaml", "experiments/deepspeed/it.json"]
    checked = CliRunner().invoke(main, ["check", *files, "--strict"], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output


def test_a_pipeline_trains_the_pipeline_trial(context: Path) -> None:
    assert start(pipeline="4", name="p").exit_code == 0
    assert load_experiment(Path("experiments/p.yaml")).trial == "model_defs.gpt2.trial:GPT2PipelineTrial"


def test_no_gpt2_of_that_size_is_a_warning(context: Path) -> None:
    assert "warning: there is no GPT-2 of 6B" in start().stderr
    assert start(model_size="124M").stderr == ""


def test_the_files_go_where_it_is_asked(context: Path) -> None:
    result = start("-o", "elsewhere", "--name", "mine", "--entrypoint", "mine_trial:Mine")
    assert result.exit_code == 0, result.output
    assert written(context) == {
        "elsewhere/experiments/mine.yaml",
        "elsewhere/experiments/deepspeed/mine.json",
    }
    assert "next: det-ds check elsewhere/experiments/mine.yaml --context elsewhere" in result.stdout
    experiment = load_experiment(Path("elsewhere/experiments/mine.yaml"))
    assert experiment.hyperparameters.get(("deepspeed_config",)) == "experiments/deepspeed/mine.json"
    assert "warning: entrypoint = 'mine_trial:Mine'" in result.stderr  # it is not written yet
    assert "the context directory has no module mine_trial" in result.stderr


@pytest.mark.parametrize(
    "code", ["train.py --epochs 3", "python3 train.py --epochs 3", "-m train --epochs 3"]
)
def test_a_script_is_an_entrypoint_too(code: str, context: Path) -> None:
    Path("train.py").write_text("import determined_ds\n")
    result = start("--entrypoint", code, "--name", "mine")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    script = load_experiment(Path("experiments/mine.yaml")).script
    assert script is not None
    assert script.words == tuple(code.removeprefix("python3 ").split())
    assert "by the name under which the script reports it" in Path("experiments/mine.yaml").read_text()


@pytest.mark.parametrize("flag", ["--stdout", "--dry-run"])
def test_a_dry_run_prints_what_would_be_written(flag: str, context: Path) -> None:
    result = start(flag)
    assert result.exit_code == 0
    assert written(context) == set()
    start()
    assert result.stdout == f"# {YAML}\n{Path(YAML).read_text()}\n# {JSON}\n{Path(JSON).read_text()}"


def test_writing_again_gives_the_same(context: Path) -> None:
    start()
    before = Path(YAML).read_bytes(), Path(JSON).read_bytes()
    assert start("--force").exit_code == 0
    assert (Path(YAML).read_bytes(), Path(JSON).read_bytes()) == before


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("there", [{YAML}, {JSON}, {YAML, JSON}], ids=str)
def test_a_file_that_is_there_is_kept(there: set[str], context: Path) -> None:
    for name in there:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("mine")
    refused(start(), *(f"{name}: is there already" for name in there), "give --force to replace it")
    assert written(context) == there
    assert all(Path(name).read_text() == "mine" for name in there)
    assert start("--force").exit_code == 0
    assert written(context) == {YAML, JSON}
    assert all(Path(name).read_text() != "mine" for name in there)


def test_a_folder_that_cannot_be_written_to(context: Path) -> None:
    Path("experiments").write_text("a file")
    refused(start(), f"{YAML}: is not a writable path", f"{JSON}: is not a writable path")
    assert written(context) == {"experiments"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(context: Path) -> None:
    Path("experiments").mkdir(mode=0o500)
    refused(start(), "cannot be written: Permission denied", "name a folder that can be written to")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"model_size": "6X"}, "--model-size = '6X'"),
        ({"gpus": "0"}, "--gpus = 0: must be 1 or more"),
        ({"global_batch_size": "70"}, "use --global-batch-size 64 or 96"),
        ({"pipeline": "3"}, "use 30 or 33 GPUs, or --pipeline 2"),
        ({"offload": "nvme"}, "--nvme-path: missing"),
        ({"precision": "bf61"}, "did you mean bf16?"),
        ({"model_size": "175B"}, "no strategy fits 32 GPUs of 80 GiB"),
        ({"name": "../up"}, "--name = '../up': is not a valid file name"),
        ({"name": ""}, "--name = '': is not a valid file name"),
        ({"entrypoint": "my_trial"}, "--entrypoint = 'my_trial': is neither MODULE:CLASS nor a script"),
        ({"entrypoint": "a.py && b.py"}, "has '&&', which only a shell understands"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused(flags: dict[str, str], said: str, context: Path) -> None:
    refused(start(**flags), said)
    assert written(context) == set()


# ------------------------------------------------------------------------------------------------------- prompts


def test_without_a_terminal_every_missing_flag_is_named(context: Path) -> None:
    result = start(**dict.fromkeys(generate.QUESTIONS))
    refused(result, *(f"error: {flag}: missing" for flag in FLAGS))
    assert result.stderr.count("error: ") == len(FLAGS)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_on_terminal", lambda: True)


@pytest.mark.usefixtures("terminal")
def test_a_terminal_is_asked_for_what_is_missing(context: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(generate.QUESTIONS)
    result = start(**nothing, answers="6B\n32\n80GiB\n64\n2048\n")
    assert result.exit_code == 0, result.output
    for question in generate.QUESTIONS.values():
        assert f"{question}: " in result.stderr
    assert written(context) == {YAML, JSON}
    asked = Path(YAML).read_bytes()
    start("--force")
    assert Path(YAML).read_bytes() == asked


@pytest.mark.usefixtures("terminal")
def test_what_a_flag_says_is_not_asked(context: Path) -> None:
    result = start(gpus=None, answers="32\n")
    assert result.exit_code == 0
    assert "GPUs in all" in result.stderr
    assert "Tokens a sample" not in result.stderr


@pytest.mark.usefixtures("terminal")
def test_a_wrong_answer_is_asked_for_again(context: Path) -> None:
    result = start(model_size=None, gpus=None, answers="6X\n6B\nmany\n0\n32\n")
    assert result.exit_code == 0, result.output
    assert "'6X' the unit X must be one of" in result.stderr
    assert "'many' is not a whole number" in result.stderr
    assert "must be 1 or more" in result.stderr
    assert written(context) == {YAML, JSON}


@pytest.mark.usefixtures("terminal")
def test_offload_to_nvme_asks_for_its_folder(context: Path) -> None:
    result = start("--name", "it", offload="nvme", answers="/local_nvme\n")
    assert result.exit_code == 0, result.output
    config = load_deepspeed_config("experiments/deepspeed/it.json")
    assert config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/local_nvme"


@pytest.mark.usefixtures("terminal")
def test_no_answer_writes_nothing(context: Path) -> None:
    result = start(gpus=None, answers="")
    assert result.exit_code != 0
    assert written(context) == set()
