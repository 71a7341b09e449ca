"""What is ignored is named, with its place and what to write instead; what cannot be honoured is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.config.deciding import nested, told
from tests.package import ROOT

# Behind a key that is ignored: its name, the commands that ignore it, and what the fix says.
EXPERIMENT = """
name: mine
entrypoint: python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial
hyperparameters:
  global_batch_size: 7
  fit: {profiling_enabled: true}  # hyperparameters.fit.profiling_enabled: run search compare
searcher:
  name: single
  metric: validation_loss
  source_checkpoint_uuid: abc  # searcher.source_checkpoint_uuid: compare
resources:
  slots_per_trial: 2
  resource_pool: a100  # resources.resource_pool: run search compare
  native_parallel: true  # resources.native_parallel: check run search compare: remove it
environment: {environment_variables: [A=1]}
checkpoint_storage: {type: s3, bucket: mine}  # checkpoint_storage: run search compare
min_validation_period: {batches: 10}  # min_validation_period: check run search compare: fit.validation_period
scheduling_unit: 10  # scheduling_unit: check run search compare: fit.reporting_period
optimizations: {aggregation_frequency: 4}  # optimizations: check run search compare: DeepSpeed JSON
profiling: {enabled: true}  # profiling.enabled: run search compare
"""
IGNORED = [
    (*line.partition("  # ")[2].split(": "), "")[:3] for line in EXPERIMENT.splitlines() if "  # " in line
]


@pytest.mark.parametrize("command", ["check", "run", "search", "compare"])
def test_every_key_that_a_command_ignores_is_named_and_no_other(command: str, tmp_path: Path) -> None:
    """The batch is refused, so that nothing is trained."""
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    words = [command, str(tmp_path / "mine.yaml"), str(ROOT)]
    if command != "check":
        words += ["--accelerator", "cpu", "--run-dir", str(tmp_path / "runs")]
    words += ["--strategies", "zero0"] if command == "compare" else []
    output = CliRunner().invoke(main, words).output
    assert "error: hyperparameters.global_batch_size = 7" in output
    found = dict(re.findall(r"warning: ([\w.]+)\b.* is ignored.*((?:\n +fix: .*)?)", output))
    of_clusters = "".join(re.findall("warning: applies only.*", output))
    found |= dict.fromkeys(re.findall(r"([\w.]+) \(\S+mine.yaml:\d+\)", of_clusters), "")
    wanted = {key: fix for key, commands, fix in IGNORED if command in commands.split()}
    assert found.keys() == wanted.keys()
    assert [key for key, fix in wanted.items() if fix not in found[key]] == []


@pytest.mark.parametrize(
    ("code", "key", "asking", "harmless"),
    [
        ("refused-key", "managed_gradient_accumulation", False, True),
        ("refused-key", "pipeline.stages", 2, "auto"),
        ("ignored-key", "dataloader_drop_last", True, False),
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
