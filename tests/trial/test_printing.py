"""DeepSpeed says nothing that is not asked for. Its instruments: ``tests/profile``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.trial.regression import train, trial_class

BATCHES = 4
OURS = ("training ", "checkpoint ", "trained ", "best ", "newest ", "validation ")


def printed(run_dir: str, ds_config: dict[str, Any], kind: str) -> str:
    """In a rank: train some batches, and return what was printed and logged."""
    from deepspeed.utils import logger

    out = io.StringIO()
    logger.handlers[0].setStream(out)  # type: ignore[attr-defined]
    adam = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    with contextlib.redirect_stdout(out):
        train(Path(run_dir), trial_class(kind), {"deepspeed_config": adam | ds_config}, steps=BATCHES)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["", "pipeline"])
def test_only_what_is_asked_for_is_printed(one_rank: Ranks, tmp_path: Path, kind: str) -> None:
    """A section that is not enabled asks for nothing; ``profile`` prints each layer that is computed again."""
    asked: dict[str, Any] = {"comms_logger": {"enabled": False, "verbose": True}}
    if kind:
        asked |= {
            "activation_checkpointing": {"partition_activations": True, "profile": True},
            "pipeline": {"activation_checkpoint_interval": 1},
        }
    [text] = one_rank.run(printed, str(tmp_path), asked, kind)
    if kind:
        assert text.count("| backward: ") >= BATCHES
    else:
        assert [
            line for line in text.splitlines() if not line.startswith(OURS) and "validation" not in line
        ] == []
