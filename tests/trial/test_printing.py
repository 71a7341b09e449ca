"""DeepSpeed says nothing that is not asked for. Its instruments: ``tests/profile``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from tests.harness.ranks import Ranks
from tests.trial.regression import train, trial_class

BATCHES = 4
OURS = ("training ", "checkpoint ", "trained ", "best ", "newest ", "validation ")


def printed(run_dir: Path, ds_config: dict[str, Any], kind: str) -> str:
    """In a rank: train some batches, and return what was printed and logged."""
    from deepspeed.utils import logger

    out = io.StringIO()
    logger.handlers[0].setStream(out)  # type: ignore[attr-defined]
    adam = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    with contextlib.redirect_stdout(out):
        train(run_dir, trial_class(kind), {"deepspeed_config": adam | ds_config}, steps=BATCHES)
    return out.getvalue()


def test_a_section_that_is_not_enabled_asks_for_nothing(one_rank: Ranks, tmp_path: Path) -> None:
    asked = {"comms_logger": {"enabled": False, "verbose": True}}
    [text] = one_rank.run(printed, tmp_path, asked, "")
    assert [
        each for each in text.splitlines() if not each.startswith(OURS) and "validation" not in each
    ] == []


def test_profile_prints_each_layer_that_is_computed_again(one_rank: Ranks, tmp_path: Path) -> None:
    asked = {"activation_checkpointing": {"partition_activations": True, "profile": True}}
    asked |= {"pipeline": {"activation_checkpoint_interval": 1}}
    [text] = one_rank.run(printed, tmp_path, asked, "pipeline")
    assert text.count("| backward: ") >= BATCHES
