"""Warnings of keys that are not looked at: beside errors, once, and not where they are looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG

GIVEN = ("resources.resource_pool=a100", "min_validation_period.batches=3")
POOL = "resources.resource_pool (--set resources.resource_pool=a100)"
COMPACT = f"warning: applies only on a cluster; ignored here: {POOL}"
PERIOD = "warning: min_validation_period"
COMMANDS = {
    "run": (),
    "search": (),
    "compare": ("--strategies", "zero0"),
    "autotune": ("--budget", "2"),
}


def invoked(command: str, own_model: Path, *overrides: str) -> tuple[int, str]:
    words = [command, str(own_model / "experiment.yaml"), str(own_model), *COMMANDS.get(command, ())]
    for override in (*GIVEN, *overrides):
        words += ["--set", override]
    if command != "check":
        words += ["--accelerator", "cpu", "--run-dir", str(own_model.parent / command)]
    else:
        words.remove(str(own_model))
        words += ["--context", str(own_model)]
    result = CliRunner().invoke(main, words)
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_warnings_are_shown_beside_errors(own_model: Path, command: str) -> None:
    """And before them: the error is what one reads last."""
    wrong = (
        "hyperparameters.global_batch_size=7",
        "hyperparameters.overwrite_deepspeed_args.dataloader_drop_last=true",
    )
    code, output = invoked(command, own_model, *wrong)
    assert code == EXIT_CONFIG
    for told in (
        COMPACT,
        PERIOD,
        "hyperparameters.fit.validation_period",
        "warning: dataloader_drop_last",
    ):
        assert told in output, output
        assert output.index(told) < output.index("error: hyperparameters.global_batch_size = 7")
        assert output.count(told) == 1


def test_check_has_a_cluster_in_mind(own_model: Path) -> None:
    """Where a pool is a pool, and a period that no trial reads is said to be ignored, once."""
    code, output = invoked("check", own_model, "checkpoint_policy=all")
    assert code == 0
    assert "resource_pool" not in output
    assert output.count(PERIOD) == 1
    assert "reads it only for entrypoints that name a class" in output
    assert "checkpoint_policy = 'all'" in output
    assert "write hyperparameters.fit.checkpoint_policy" in output
