"""``det-ds new --experiment``: what it chooses fits, divides, communicates least of what fits, and runs as chosen."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import assume, given
from hypothesis import strategies as st

from determined_ds import ResolvedConfig, load_deepspeed_config, load_experiment
from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import ROOT
from tests.memory.estimates import estimate
from tests.package import CUDA, bytes_per_rank, decide, schema_problems

FLAGS = {"parameters": "6B", "slots": 32, "gpu_memory": "80GiB"}
FLAGS |= {"global_batch_size": 64, "sequence_length": 2048}
YAML, JSON = "experiments/6b_zero1_32gpu.yaml", "experiments/deepspeed/6b_zero1_32gpu.json"


def start(*more: str, **flags: Any) -> Result:
    """With the flags above, changed as asked."""
    name = [flags.pop("name")] if "name" in flags else []
    given = {**FLAGS, **flags}.items()
    words = [word for flag, value in given for word in ("--" + flag.replace("_", "-"), str(value))]
    return CliRunner().invoke(main, ["new", *name, "--experiment", *words, *more])


# ------------------------------------------------------------------------------------------------------ choosing


def files_of(result: Result) -> tuple[dict[str, Any], dict[str, Any]]:
    """The experiment's YAML and the DeepSpeed JSON that a dry run prints."""
    assert result.exit_code == 0, result.output
    _, experiment, ds_config = re.split(r"^# \S+\.(?:yaml|json)\n", result.stdout, flags=re.MULTILINE)
    return yaml.safe_load(experiment), json.loads(ds_config)


def decided(experiment: dict[str, Any], ds_config: dict[str, Any], **changes: int) -> ResolvedConfig:
    """What a run makes of the two; of another ZeRO ``stage`` or micro-batch, if asked."""
    config, micro = json.loads(json.dumps(ds_config)), "train_micro_batch_size_per_gpu"
    config["zero_optimization"]["stage"] = changes.get("stage", config["zero_optimization"]["stage"])
    config[micro] = changes.get("micro", config[micro])
    slots = experiment["resources"]["slots_per_trial"]
    gpus = replace(CUDA, num_devices=slots)
    return decide(experiment["hyperparameters"], config, slots=slots, accelerator=gpus)


@cache
def estimated(size: str, sequence_length: int, gpu_memory: str) -> dict[str, Any]:
    words = ("--parameters", size, "--sequence-length", sequence_length, "--gpu-memory", gpu_memory)
    return estimate(*words)


def fits(answers: dict[str, Any], resolved: ResolvedConfig) -> bool:
    """By the estimate, for a transformer of that size."""
    found = estimated(answers["parameters"], answers["sequence_length"], answers["gpu_memory"])
    names = ("num_parameters", "num_layers", "hidden_size", "num_heads", "vocab_size", "sequence_length")
    held = bytes_per_rank(resolved, **{name: found["model"][name] for name in names})
    return sum(held.values()) - held["host"] <= int(found["usable_bytes"])


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """Answers that go together."""
    gpus = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 96, 512]))
    pipeline = draw(st.sampled_from([1, 1, 2, 4]))
    assume(gpus % pipeline == 0)
    return {
        "parameters": draw(st.sampled_from(["50M", "124M", "1.5B", "6B", "13B", "30B", "70B", "175B"])),
        "slots": gpus,
        "gpu_memory": draw(st.sampled_from(["8GiB", "16GB", "24GiB", "40GiB", "80GiB", "141GB"])),
        "global_batch_size": gpus // pipeline * draw(st.integers(1, 96)),
        "sequence_length": draw(st.sampled_from([128, 1024, 2048, 8192])),
        "precision": draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        "offload": draw(st.sampled_from(["none", "auto", "cpu"])) if pipeline == 1 else "none",
        "pipe_parallel_size": pipeline,
    }


@given(answers())
def test_what_is_chosen_fits_divides_communicates_least_and_is_valid(answers: dict[str, Any]) -> None:
    """Where nothing fits, the GPU that the refusal advises is a way out."""
    result = start("--dry-run", **answers)
    if result.exit_code != 0:
        (size,) = re.findall(r"fix: use --gpu-memory ([0-9]+GiB)", result.stderr)
        files_of(start("--dry-run", **{**answers, "gpu_memory": size}))
        return
    experiment, ds_config = files_of(result)
    resolved = decided(experiment, ds_config)
    batch = resolved.batch
    assert (fits(answers, resolved), resolved.topology.slots) == (True, answers["slots"])
    assert batch.micro_batch_size * batch.accumulation * batch.replicas == answers["global_batch_size"]
    assert {warning.code for warning in resolved.warnings} <= {"pipeline-bubble"}
    assert schema_problems(experiment)[0] == []
    if answers["pipe_parallel_size"] > 1:
        return
    if answers["offload"] == "none":
        for stage in range(resolved.zero_stage):
            assert not fits(answers, decided(experiment, ds_config, stage=stage, micro=1))


# ------------------------------------------------------------------------------------------------------- writing


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A context directory with GPT-2's trial in it, and in it we are."""
    (tmp_path / "model_defs" / "gpt2").mkdir(parents=True)
    shutil.copy(ROOT / "model_defs" / "gpt2" / "trial.py", tmp_path / "model_defs" / "gpt2" / "trial.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_written_was_chosen_from_a_table_and_is_written_alike_again(context: Path) -> None:
    result = start("--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert f"wrote {YAML}\nwrote {JSON}\nnext: det-ds check {YAML}\n" in result.stdout
    rows = re.findall(r"^(ZeRO \d\S*(?: recomputed)?)( \*)? .* (yes|no) ", result.stdout, re.MULTILINE)
    assert ("ZeRO 0", "", "no") in rows
    assert [row for row in rows if row[1]] == [("ZeRO 1", " *", "yes")]
    assert "GPT2Trial stands in for your model" in result.stderr
    before, again = (Path(YAML).read_text(), Path(JSON).read_text()), ("--precision", "bf16", "--force")
    Path(JSON).write_text("mine")
    assert start(*again).exit_code == 0
    assert (Path(YAML).read_text(), Path(JSON).read_text()) == before


@pytest.mark.parametrize(
    ("flags", "stage", "offloaded"),
    [
        ({"parameters": "70B", "slots": 1, "offload": "cpu"}, 3, ["optimizer", "param"]),
        ({"pipe_parallel_size": 4}, 1, []),
    ],
    ids=str,
)
def test_the_cheapest_that_fits_is_written_and_check_passes_it(
    flags: dict[str, Any], stage: int, offloaded: list[str], context: Path
) -> None:
    result = start(name="it", **flags)
    assert result.exit_code == 0, result.output
    files = ["experiments/it.yaml", "experiments/deepspeed/it.json"]
    checked = CliRunner().invoke(main, ["check", *files, "--strict"], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output
    zero = load_deepspeed_config(files[1])["zero_optimization"]
    assert zero["stage"] == stage
    assert [kind for kind in ("optimizer", "param") if f"offload_{kind}" in zero] == offloaded
    experiment, stages = load_experiment(Path(files[0])), flags.get("pipe_parallel_size", 1)
    assert experiment.hyperparameters.data["pipe_parallel_size"] == stages
    assert experiment.trial == f"model_defs.gpt2.trial:GPT2{'Pipeline' * (stages > 1)}Trial"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"offload": "cpu", "pipe_parallel_size": 4}, "leave out --offload"),
        ({"global_batch_size": 70}, "use global_batch_size 64 or 96"),
        ({"parameters": "175B"}, "no strategy fits 32 GPUs of 80 GiB"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused(flags: dict[str, Any], said: str, context: Path) -> None:
    result = start(**flags)
    assert (result.exit_code, result.stdout) == (EXIT_CONFIG, "")
    assert said in result.stderr
    assert not (context / "experiments").exists()
