"""DeepSpeed's instruments in a user's JSON print what they should, and leave the training the same to the bit."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import records
from tests.trial.regression import train, trial_class

ASKED = {
    "memory_breakdown": True,
    "wall_clock_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 2},
}


def printed(run_dir: Path, kind: str, zero_stage: int, asked: dict[str, Any]) -> str:
    """In a rank: train some batches, with a validation between them; what was printed."""
    ds_config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **asked,
    }
    from determined.pytorch import Batch

    hparams = {"pipe_parallel_size": 2 if kind else 1, "deepspeed_config": ds_config}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(run_dir, trial_class(kind), hparams, steps=6, validation_period=Batch(2))
    return out.getvalue()


@pytest.mark.parametrize(("kind", "zero_stage"), [("", 3), ("pipeline", 1)])
def test_what_a_json_switches_on_is_printed_and_changes_nothing(
    two_ranks: Ranks, tmp_path: Path, kind: str, zero_stage: int
) -> None:
    """In deepspeed 0.19.8 a pipeline's timers, and so its ``flops_profiler``, fail in the first backward pass."""
    two_ranks.run(printed, tmp_path / "plain", kind, zero_stage, {})
    text, _ = two_ranks.run(printed, tmp_path / "asked", kind, zero_stage, ASKED)
    assert all(word in text for word in ("time (ms)", "Max_MA"))
    plain, asked = (
        [report["loss"] for _, report in records(tmp_path / name, "training")] for name in ("plain", "asked")
    )
    assert len(plain) == 6
    assert asked == plain
