"""What is ignored is named, with its place and what to write instead; what cannot be honoured is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.config.deciding import nested, told
from tests.package import LOG_POLICIES, ROOT

# ------------------------------------------------------------------------------------------- the experiment

MINIMAL = f"""
name: mine
entrypoint: python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial
hyperparameters: {{global_batch_size: 7, fit: {{max_length: {{batches: 3}}, profiling_enabled: PROFILING}}}}
log_policies: {json.dumps(LOG_POLICIES)}
"""
ASKING = """
searcher: {name: single, metric: validation_loss, smaller_is_better: true, source_checkpoint_uuid: abc}
resources: {slots_per_trial: 2, resource_pool: a100, max_slots: 4}
environment: {image: an/image, environment_variables: [A=1]}
checkpoint_storage: {type: shared_fs, host_path: /a, checkpoint_path: b, save_trial_best: 2}
min_validation_period: {batches: 10}
scheduling_unit: 10
records_per_epoch: 1000
optimizations: {aggregation_frequency: 4}
profiling: {enabled: true, begin_on_batch: 5}
"""
IDLE = """
searcher: {name: single, metric: validation_loss, smaller_is_better: true}
resources: {slots_per_trial: 2, native_parallel: false}
data: {url: here}
reproducibility: {experiment_seed: 3}
profiling: {enabled: false, begin_on_batch: 5}
scheduling_unit: 100
bind_mounts: null
"""
# Read for no trial of ours: key -> what the fix says.
NOWHERE = {
    "min_validation_period": "validation_period",
    "scheduling_unit": "reporting_period",
    "records_per_epoch": "",
    "optimizations": "DeepSpeed JSON",
    "checkpoint_storage.checkpoint_path": "storage_path",
    "profiling.begin_on_batch": "remove it",
}
CLUSTER_ONLY = {"resources.resource_pool", "environment.image", "checkpoint_storage", "profiling.enabled"}
CLUSTER_ONLY |= {"hyperparameters.fit.profiling_enabled"}
SOURCE, SLOTS = "searcher.source_checkpoint_uuid", "resources.max_slots"
# Command -> its words, what applies only on a cluster, and what it ignores beside.
COMMANDS: dict[str, tuple[tuple[str, ...], set[str], set[str]]] = {
    "check": ((), set(), set()),
    "run": ((), {*CLUSTER_ONLY, SLOTS}, set()),
    "search": ((), CLUSTER_ONLY, set()),
    "compare": (("--strategies", "zero0"), {*CLUSTER_ONLY, SLOTS}, {SOURCE}),
}


def warnings(command: str, text: str, tmp_path: Path) -> list[str]:
    """What a command warns of before it refuses the batch of the experiment."""
    (tmp_path / "mine.yaml").write_text(text)
    words = [command, str(tmp_path / "mine.yaml"), str(ROOT), *COMMANDS[command][0]]
    if command != "check":
        words += ["--accelerator", "cpu", "--run-dir", str(tmp_path / "runs")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, result.output
    assert "hyperparameters.global_batch_size = 7" in result.output
    return re.findall(r"warning: (.*(?:\n +fix: .*)?)", result.output)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_that_a_command_ignores_is_named_and_no_other(command: str, tmp_path: Path) -> None:
    _, of_clusters, others = COMMANDS[command]
    found = warnings(command, MINIMAL.replace("PROFILING", "true") + ASKING, tmp_path)
    said = {line.split()[0].rstrip(":"): line for line in found}
    cluster_only = said.pop("applies", "")
    assert set(re.findall(r"([\w.]+) \(\S+mine.yaml:\d+\)", cluster_only)) == of_clusters
    assert said.keys() == NOWHERE.keys() | others
    assert all("is ignored" in line and NOWHERE.get(key, "") in line for key, line in said.items())
    assert warnings(command, MINIMAL.replace("PROFILING", "false") + IDLE, tmp_path) == []


def test_where_an_entrypoint_names_a_class_determined_reads_more_of_them(tmp_path: Path) -> None:
    text = MINIMAL.replace("python3 -m determined_ds.train ", "").replace("PROFILING", "false")
    (tmp_path / "mine.yaml").write_text(text + ASKING)
    said = CliRunner().invoke(main, ["check", str(tmp_path / "mine.yaml"), str(ROOT)]).output
    assert re.findall(r"warning: ([\w.]+).*ignored-key", said) == [
        "optimizations",
        "profiling.begin_on_batch",
    ]


# --------------------------------------------------------------------------------------- the DeepSpeed JSON


@pytest.mark.parametrize(
    ("code", "key", "asking", "harmless"),
    [
        ("refused-key", "managed_gradient_accumulation", False, True),
        ("refused-key", "pipeline.stages", 2, "auto"),
        ("refused-key", "pipeline.partition", "uniform", "best"),
        ("refused-key", "pipeline.seed_layers", True, False),
        ("refused-key", "autotuning.enabled", True, False),
        ("refused-key", "checkpoint.load_universal", True, False),
        ("refused-key", "checkpoint.writer.decoupled", True, False),
        ("refused-key", "datastates_ckpt", {"enabled": True}, {}),
        ("ignored-key", "dataloader_drop_last", True, False),
        ("ignored-key", "zero_optimization.allgather_partitions", False, True),
        ("ignored-key", "vocabulary_size", 1000, "auto"),
        ("ignored-key", "weight_quantization.num_bits", 4, "auto"),
        ("ignored-key", "weight_quantization", {"enabled": True}, {"enabled": False, "num_bits": 4}),
    ],
)
def test_what_is_not_honoured_is_refused_or_warned_of_unless_it_says_the_default(
    code: str, key: str, asking: Any, harmless: Any
) -> None:
    problems, warned_of = told(ds=nested(key, asking))
    (found,) = [*problems, *warned_of]
    assert (found.code, found.key.startswith(key), bool(problems)) == (code, True, code != "ignored-key")
    assert found.fix
    assert told(ds=nested(key, harmless)) == ([], [])


def test_an_old_name_that_asks_for_nothing_is_warned_of() -> None:
    key, new = "zero_optimization.cpu_offload", {"offload_optimizer": {"device": "none"}}
    problems, (warning,) = told(ds=nested(key, False))
    assert (problems, warning.code, warning.key) == ([], "ignored-key", key)
    for ds in (nested(key, True), {"zero_optimization": {"cpu_offload": False, **new}}):
        assert [(each.code, each.key) for each in told(ds=ds)[0]] == [("deprecated-key", key)]
