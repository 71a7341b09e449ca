"""DeepSpeed prints what it is asked for and its warnings. Its instruments: ``tests/profile``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from tests.harness.ranks import Ranks
from tests.trial.regression import train, trial_class

BATCHES = 4


def printed(run_dir: str, ds_config: dict[str, Any], kind: str = "") -> str:
    """In a rank: train some batches, and return what was printed and logged."""
    from deepspeed.utils import logger

    out = io.StringIO()
    logger.handlers[0].setStream(out)  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(out):
        train(Path(run_dir), trial_class(kind), {"deepspeed_config": ds_config}, steps=BATCHES)
    return out.getvalue()


def with_adam(**asked: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **asked,
    }


def test_what_is_not_asked_for_is_not_printed(one_rank: Ranks, tmp_path: Path) -> None:
    """DeepSpeed says nothing of itself; and a section that is not enabled asks for nothing."""
    [text] = one_rank.run(printed, str(tmp_path), with_adam(comms_logger={"enabled": False, "verbose": True}))
    said = [
        line
        for line in text.splitlines()
        if not line.startswith(("training ", "checkpoint ", "trained ", "best ", "newest "))
    ]
    assert [line for line in said if "validation" not in line] == []


def test_the_section_activation_checkpointing_reaches_deepspeeds_function(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Which a pipeline calls; no engine hands it over. ``profile`` prints each time that a layer is computed again."""
    asked = {
        "activation_checkpointing": {"partition_activations": True, "profile": True},
        "pipeline": {"activation_checkpoint_interval": 1},
    }
    [text] = one_rank.run(printed, str(tmp_path), with_adam(**asked), "pipeline")
    assert text.count("| backward: ") >= BATCHES
