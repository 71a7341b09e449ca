"""DeepSpeed prints what is asked for, and nothing else. Its instruments: ``tests/profile``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from tests.harness.ranks import Ranks
from tests.trial.regression import train, trial_class

BATCHES = 4
OURS = ("training ", "checkpoint ", "trained ", "best ", "newest ", "validation ")


def printed(run_dir: Path, ds_config: dict[str, Any], kind: str) -> list[str]:
    """In a rank: train some batches, and return the lines that were printed and logged beside the library's."""
    from deepspeed.utils import logger

    out = io.StringIO()
    logger.handlers[0].setStream(out)  # type: ignore[attr-defined]
    adam = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    with contextlib.redirect_stdout(out):
        train(run_dir, trial_class(kind), {"deepspeed_config": adam | ds_config}, steps=BATCHES)
    lines = out.getvalue().splitlines()
    return [each for each in lines if not each.startswith(OURS) and "validation" not in each]


def test_it_prints_what_is_asked_for(one_rank: Ranks, tmp_path: Path) -> None:
    """Nothing for a section that is not enabled; each layer that is computed again for a profile of them."""
    asked: dict[str, Any] = {"comms_logger": {"enabled": False, "verbose": True}}
    assert one_rank.run(printed, tmp_path / "nothing", asked, "") == [[]]
    asked = {"activation_checkpointing": {"partition_activations": True, "profile": True}}
    asked |= {"pipeline": {"activation_checkpoint_interval": 1}}
    [lines] = one_rank.run(printed, tmp_path / "layers", asked, "pipeline")
    assert sum("| backward: " in line for line in lines) >= BATCHES
