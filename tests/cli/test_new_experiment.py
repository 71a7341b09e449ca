"""``det-ds new --experiment``: what it chooses fits, divides, communicates least of what fits, and runs as chosen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import load_deepspeed_config, load_experiment
from determined_ds.cli.main import main
from tests.harness.command import ROOT
from tests.memory.estimates import estimate

FLAGS = {"parameters": "6B", "slots": 32, "gpu_memory": "80GiB"}
FLAGS |= {"global_batch_size": 64, "sequence_length": 2048}


def start(*more: str, **flags: Any) -> Result:
    """With the flags above, changed as asked."""
    name = [flags.pop("name")] if "name" in flags else []
    given = {**FLAGS, **flags}.items()
    words = [word for flag, value in given for word in ("--" + flag.replace("_", "-"), str(value))]
    return CliRunner().invoke(main, ["new", *name, "--experiment", *words, *more])


ANSWERS = st.fixed_dictionaries(
    {
        "parameters": st.sampled_from(["50M", "1.5B", "6B", "13B", "70B", "175B"]),
        "slots": st.sampled_from([1, 2, 8, 32, 96, 512]),
        "gpu_memory": st.sampled_from(["8GiB", "16GB", "40GiB", "80GiB", "141GB"]),
        "sequence_length": st.sampled_from([128, 1024, 8192]),
    }
)


@given(ANSWERS, st.integers(1, 96))
def test_what_is_chosen_fits_divides_and_communicates_least(answers: dict[str, Any], share: int) -> None:
    """As ``check --memory`` estimates it. Where nothing fits, each way out that is advised is one."""
    how = {**answers, "global_batch_size": share * answers["slots"], "offload": "none"}
    result = start("--dry-run", **how)
    if result.exit_code != 0:
        (size,) = re.findall(r"fix: use --gpu-memory ([0-9]+GiB)", result.stderr)
        assert start("--dry-run", **{**how, "gpu_memory": size}).exit_code == 0
        offloaded = start("--dry-run", **{**how, "offload": "auto"})
        assert (offloaded.exit_code == 0) == ("or --offload auto" in result.stderr)
        return
    _, experiment, ds_config = re.split(r"^# \S+\.(?:yaml|json)\n", result.stdout, flags=re.MULTILINE)
    recomputed = yaml.safe_load(experiment)["hyperparameters"]["activation_checkpointing"]
    chosen = json.loads(ds_config)
    stage, micro = chosen["zero_optimization"]["stage"], chosen["train_micro_batch_size_per_gpu"]
    words = [word for flag, value in answers.items() for word in ("--" + flag.replace("_", "-"), value)]
    found = estimate(*words, *["--activation-checkpointing"] * recomputed)["strategies"]
    most = [row["largest_micro_batch"] or 0 for row in found[: stage + 1]]
    assert most[:-1] == [0] * stage
    assert most[-1] >= micro
    assert share % micro == 0


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A context directory with GPT-2's trial in it, and in it we are."""
    (tmp_path / "model_defs" / "gpt2").mkdir(parents=True)
    shutil.copy(ROOT / "model_defs" / "gpt2" / "trial.py", tmp_path / "model_defs" / "gpt2" / "trial.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
