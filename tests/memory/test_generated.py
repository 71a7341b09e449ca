"""What ``new --experiment`` chooses fits, divides, communicates least of what fits, and runs as it was chosen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import assume, given
from hypothesis import strategies as st

from determined_ds import ResolvedConfig
from determined_ds.cli.main import main
from tests.harness.master_schemas import errors
from tests.harness.ranks import ROOT
from tests.memory.estimates import estimate
from tests.package import CUDA, bytes_per_rank, decide

ISSUE: dict[str, Any] = {
    "parameters": "6B",
    "slots": 32,
    "gpu_memory": "80GiB",
    "global_batch_size": 64,
    "sequence_length": 2048,
}
STORAGE = {"type": "shared_fs", "host_path": "/determined"}
DEVICE = ("parameters", "gradients", "optimizer_states", "activations", "buffers")


def asked_for(answers: dict[str, Any]) -> Result:
    words = [word for name, value in answers.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return CliRunner().invoke(main, ["new", "it", "--experiment", *words, "-o", str(ROOT), "--dry-run"])


def files_of(answers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The experiment's YAML and the DeepSpeed JSON."""
    result = asked_for(answers)
    assert result.exit_code == 0, result.output
    _, experiment, ds_config = re.split(r"^# \S+it\.(?:yaml|json)\n", result.stdout, flags=re.MULTILINE)
    return yaml.safe_load(experiment), json.loads(ds_config)


def decided(experiment: dict[str, Any], ds_config: dict[str, Any], **changes: int) -> ResolvedConfig:
    """What a run makes of the two; of another ZeRO ``stage`` or micro-batch, if asked."""
    config = json.loads(json.dumps(ds_config))
    config["zero_optimization"]["stage"] = changes.get("stage", config["zero_optimization"]["stage"])
    micro = "train_micro_batch_size_per_gpu"
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
    return sum(held[kind] for kind in DEVICE) <= int(found["usable_bytes"])


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """Answers that go together."""
    gpus = draw(st.sampled_from([1, 2, 4, 8, 16, 32, 96, 512]))
    pipeline = draw(st.sampled_from([1, 1, 2, 4]))
    assume(gpus % pipeline == 0)
    offload = draw(st.sampled_from(["none", "auto", "cpu"])) if pipeline == 1 else "none"
    return {
        "parameters": draw(st.sampled_from(["50M", "124M", "1.5B", "6B", "13B", "30B", "70B", "175B"])),
        "slots": gpus,
        "gpu_memory": draw(st.sampled_from(["8GiB", "16GB", "24GiB", "40GiB", "80GiB", "141GB"])),
        "global_batch_size": gpus // pipeline * draw(st.integers(1, 96)),
        "sequence_length": draw(st.sampled_from([128, 1024, 2048, 8192])),
        "precision": draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        "offload": offload,
        "pipe_parallel_size": pipeline,
    }


@given(answers())
def test_what_is_chosen_fits_divides_communicates_least_and_is_taken_by_a_master(
    answers: dict[str, Any],
) -> None:
    """Where nothing fits, every option that the refusal advises is a way out."""
    result = asked_for(answers)
    if result.exit_code != 0:
        ways = re.findall(r"--([a-z-]+) ([0-9a-zA-Z]+)", result.stderr.partition("fix: ")[2])
        assert ways
        for flag, value in ways:
            files_of({**answers, flag.replace("-", "_"): value})
        return
    experiment, ds_config = files_of(answers)
    resolved = decided(experiment, ds_config)
    batch = resolved.batch
    assert fits(answers, resolved)
    assert resolved.topology.slots == answers["slots"]
    assert batch.micro_batch_size * batch.accumulation * batch.replicas == answers["global_batch_size"]
    assert {warning.code for warning in resolved.warnings} <= {"pipeline-bubble"}
    assert errors(experiment, checkpoint_storage=STORAGE) == []
    if answers["pipe_parallel_size"] > 1 or resolved.topology.sequence_parallel_size > 1:
        return
    if answers["offload"] == "none":
        for stage in range(resolved.zero_stage):
            assert not fits(answers, decided(experiment, ds_config, stage=stage, micro=1))
    share, own = answers["global_batch_size"] // answers["slots"], batch.micro_batch_size
    larger = [size for size in range(own + 1, share + 1) if share % size == 0]
    assert not larger or not fits(answers, decided(experiment, ds_config, micro=larger[0]))


@pytest.mark.parametrize(
    ("changes", "zero_stage", "offloaded", "checkpointing", "micro_batch"),
    [
        ({}, 1, [], False, 2),
        ({"parameters": "1.5B"}, 0, [], False, 2),
        ({"parameters": "70B"}, 3, [], True, 2),
        ({"pipe_parallel_size": 4, "global_batch_size": 512}, 1, [], False, 4),
        ({"offload": "nvme", "nvme_path": "/nvme"}, 3, ["offload_optimizer"], False, 2),
        ({"parameters": "13B", "slots": 1, "offload": "auto"}, 1, ["offload_optimizer"], False, 1),
        (
            {"parameters": "70B", "slots": 1, "offload": "cpu"},
            3,
            ["offload_optimizer", "offload_param"],
            False,
            1,
        ),
    ],
)
def test_the_cheapest_that_fits_is_chosen(
    changes: dict[str, Any], zero_stage: int, offloaded: list[str], checkpointing: bool, micro_batch: int
) -> None:
    experiment, ds_config = files_of({**ISSUE, **changes})
    zero = ds_config["zero_optimization"]
    assert zero["stage"] == zero_stage
    assert sorted(key for key in zero if key.startswith("offload")) == offloaded
    assert {zero[key]["device"] for key in offloaded} <= {"nvme" if "nvme_path" in changes else "cpu"}
    assert experiment["hyperparameters"]["activation_checkpointing"] == checkpointing
    assert ds_config["train_micro_batch_size_per_gpu"] == micro_batch
    assert experiment["hyperparameters"]["pipe_parallel_size"] == changes.get("pipe_parallel_size", 1)


@pytest.mark.parametrize(
    ("changes", "schedule", "chunks"),
    [
        ({}, "zb-h1", 1),
        ({"parameters": "30B", "slots": 64, "global_batch_size": 512}, "interleaved", 2),
    ],
    ids=["kept", "recomputed"],
)
def test_a_pipelines_schedule_is_the_one_that_waits_least(
    changes: dict[str, Any], schedule: str, chunks: int
) -> None:
    """Of those that its layers and micro-batches make, and that fit: zb-h1 cannot recompute activations."""
    experiment, ds_config = files_of({**ISSUE, "pipe_parallel_size": 4, **changes})
    resolved = decided(experiment, ds_config)
    assert (resolved.strategy.pipe_schedule, resolved.strategy.pipe_chunks) == (schedule, chunks)
    assert experiment["hyperparameters"]["partition_method"] == "measured"
