"""What the chief shows: plain lines, and a block at the end that says what came of it."""

from __future__ import annotations

import pytest

from determined_ds.runtime.checkpoints.trial_state import TrialState
from determined_ds.runtime.loop.progress import LogLines

RATES = {"samples_per_second": 164.2, "tokens_per_second": 21_017.0}


def closing(capsys: pytest.CaptureFixture[str], state: TrialState, best_at: int) -> list[str]:
    lines = LogLines()
    lines.start(total=200, done=0)
    lines.report("training", 100, {"loss": 3.0, "peak_memory_gib": 0.71, **RATES})
    lines.report("validation", 100, {"validation_loss": 2.5, "batches": 100})
    lines.report("training", 200, {"loss": 2.0, "peak_memory_gib": 0.6, **RATES})
    lines.report("validation", 200, {"validation_loss": 2.25, "batches": 200})
    capsys.readouterr()
    lines.end(state, best_at=best_at)
    return capsys.readouterr().out.splitlines()


def test_the_closing_block_names_what_was_trained_and_the_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = TrialState(batches_trained=200, last_checkpoint=200, kept=["one", "two"], best="two")
    assert closing(capsys, state, 200) == [
        "trained     200 of 200 batches in 0 s  164 samples/s  21,017 tokens/s  0.71 GiB a rank at most",
        "best        batch 200  validation_loss 2.25  two",
    ]


def test_the_newest_is_named_where_it_is_not_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """After a stop, and where the best was of an earlier start."""
    state = TrialState(batches_trained=150, last_checkpoint=150, kept=["one", "two"], best="one")
    trained, *checkpoints = closing(capsys, state, -1)
    assert trained.startswith("trained     150 of 200 batches")
    assert checkpoints == ["best        one", "newest      batch 150  two"]


def test_without_a_checkpoint_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(closing(capsys, TrialState(batches_trained=200), -1)) == 1
