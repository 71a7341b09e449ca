"""What is ignored is named, with its place and what to write instead; what cannot be honoured is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.config.deciding import nested, told
from tests.package import LOG_POLICIES, ROOT, decide, refusal

# ------------------------------------------------------------------------------------------- the experiment

MINIMAL = f"""
name: mine
entrypoint: python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial
hyperparameters: {{global_batch_size: 7, fit: {{max_length: {{batches: 3}}, profiling_enabled: PROFILING}}}}
log_policies: {json.dumps(LOG_POLICIES)}
"""
ASKING = """
searcher: {name: single, metric: validation_loss, smaller_is_better: true, source_checkpoint_uuid: abc}
resources: {slots_per_trial: 2, resource_pool: a100, shm_size: 4096, max_slots: 4}
environment: {image: an/image, environment_variables: [A=1]}
bind_mounts: [{host_path: /data, container_path: data}]
checkpoint_storage: {type: s3, bucket: mine, save_trial_best: 2}
min_validation_period: {batches: 10}
min_checkpoint_period: {epochs: 1}
perform_initial_validation: true
checkpoint_policy: all
scheduling_unit: 10
records_per_epoch: 1000
optimizations: {aggregation_frequency: 4}
profiling: {enabled: true, begin_on_batch: 5}
"""
# Of no trial: key -> what the fix says.
NOWHERE = {
    "min_validation_period": "validation_period",
    "min_checkpoint_period": "checkpoint_period",
    "perform_initial_validation": "step_zero_validation",
    "checkpoint_policy": "checkpoint_policy",
    "scheduling_unit": "reporting_period",
    "records_per_epoch": "",
    "optimizations": "DeepSpeed JSON",
    "profiling.begin_on_batch": "remove it",
}
CLUSTER_ONLY = {
    "resources.resource_pool",
    "resources.shm_size",
    "environment.image",
    "bind_mounts",
    "checkpoint_storage",
    "profiling.enabled",
    "hyperparameters.fit.profiling_enabled",
}
# Command -> its words, and what it ignores beside NOWHERE.
COMMANDS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "check": ((), set()),
    "run": ((), {*CLUSTER_ONLY, "resources.max_slots"}),
    "search": ((), CLUSTER_ONLY),
    "compare": (
        ("--strategies", "zero0"),
        {*CLUSTER_ONLY, "resources.max_slots", "searcher.source_checkpoint_uuid"},
    ),
}


def warnings(command: str, text: str, tmp_path: Path) -> list[str]:
    """What a command warns of before it refuses the batch of the experiment."""
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    words = [command, str(config), str(ROOT), *COMMANDS[command][0]]
    if command != "check":
        words += ["--accelerator", "cpu", "--run-dir", str(tmp_path / "runs")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, result.output
    assert "hyperparameters.global_batch_size = 7" in result.output
    return re.findall(r"warning: (.*(?:\n +fix: .*)?)", result.output)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_that_a_command_ignores_is_named(command: str, tmp_path: Path) -> None:
    said = warnings(command, MINIMAL.replace("PROFILING", "true") + ASKING, tmp_path)
    for key, fix in NOWHERE.items():
        (line,) = [line for line in said if line.startswith(key)]
        assert "ignored" in line
        assert fix in line
    others = "\n".join(line for line in said if not line.startswith(tuple(NOWHERE)))
    sections = {name: keys for name, keys in yaml.safe_load(ASKING).items() if isinstance(keys, dict)}
    keys = {f"{section}.{key}" for section, below in sections.items() for key in below}
    ignored = COMMANDS[command][1]
    keys |= {"bind_mounts", "checkpoint_storage", "hyperparameters.fit.profiling_enabled"}
    assert {key for key in keys if key in others} == ignored
    if "environment.image" in ignored:
        assert re.search(r"applies only on a cluster.*resources.resource_pool \(\S+mine.yaml:8\)", others)


IDLE = """
searcher: {name: single, metric: validation_loss, smaller_is_better: true}
resources: {slots_per_trial: 2, native_parallel: false}
description: b
labels: [c]
max_restarts: 2
data: {url: here}
reproducibility: {experiment_seed: 3}
profiling: {enabled: false}
security: null
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_names_and_values_that_say_the_default_are_no_warning(command: str, tmp_path: Path) -> None:
    assert warnings(command, MINIMAL.replace("PROFILING", "false") + IDLE, tmp_path) == []


# --------------------------------------------------------------------------------------- the DeepSpeed JSON


@pytest.mark.parametrize(
    ("key", "asking", "default"),
    [
        ("managed_gradient_accumulation", False, True),
        ("pipeline.stages", 2, "auto"),
        ("pipeline.partition", "uniform", "best"),
        ("pipeline.seed_layers", True, False),
        ("autotuning.enabled", True, False),
        ("checkpoint.load_universal", True, False),
        ("checkpoint.writer.decoupled", True, False),
        ("datastates_ckpt", {"enabled": True}, {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_unless_it_says_the_default(
    key: str, asking: Any, default: Any
) -> None:
    problem = refusal(lambda: decide(ds=nested(key, asking)))
    assert problem.key == key
    assert problem.fix
    assert told(ds=nested(key, default))[0] == []


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        (nested("zero_optimization.allgather_partitions", False), "zero_optimization.allgather_partitions"),
        ({"weight_quantization": {"enabled": True, "num_bits": 4}}, "weight_quantization"),
    ],
)
def test_what_nothing_reads_is_a_warning(data: dict[str, Any], key: str) -> None:
    found = {each.key: each for each in decide(ds=data).warnings}
    assert any(each == key or each.startswith(f"{key}.") for each in found), found
    assert all(each.code == "ignored-key" and each.fix for each in found.values())
