"""What is warned of stands before the errors, once: the error is what one reads last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.own_runs import invoke

OVERRIDES = [
    "resources.resource_pool=a100",
    "min_validation_period.batches=3",
    "hyperparameters.global_batch_size=7",
    "hyperparameters.overwrite_deepspeed_args.dataloader_drop_last=true",
]
WARNED = [
    "warning: applies only on a cluster; ignored here: resources.resource_pool (--set resources.resource_pool=a100)",
    "warning: min_validation_period",
    "warning: dataloader_drop_last",
]


@pytest.mark.parametrize("words", ["run", "search", "compare --strategies zero0", "autotune --budget 2"])
def test_warnings_are_shown_before_errors(own_model: Path, words: str) -> None:
    command, *options = words.split()
    sets = [word for override in OVERRIDES for word in ("--set", override)]
    done = invoke(command, own_model, *options, *sets, "--run-dir", own_model.parent / "run")
    assert done.exit_code == 2
    for said in WARNED:
        assert done.output.count(said) == 1
        assert done.output.index(said) < done.output.index("error: hyperparameters.global_batch_size = 7")
