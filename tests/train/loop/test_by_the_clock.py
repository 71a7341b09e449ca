"""Checkpoints by the clock: what is trained does not depend on when they are written, and they are due in time."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from determined.pytorch import Batch

from determined_ds import Trainer
from determined_ds.errors import ConfigError
from tests.harness.ranks import Ranks
from tests.train.small import fit, linear_trial, saved_steps


def train_on_a_clock(run_dir: str, batch_minutes: int, save_minutes: int) -> None:
    """In a rank: the chief's clock goes on by so much with a batch, and a checkpoint. Nothing is due by the other's."""
    os.environ["DETERMINED_DS_HANG_TIMEOUT"] = "0"
    monotonic, ahead_s = time.monotonic, [0.0]

    class Slow(linear_trial()):  # type: ignore[misc]
        def train_batch(self, *given: Any) -> Any:
            ahead_s[0] += 60 * batch_minutes if self.context.distributed.rank == 0 else 0
            return super().train_batch(*given)

        def save(self, *given: Any) -> None:
            super().save(*given)
            ahead_s[0] += 60 * save_minutes if self.context.distributed.rank == 0 else 0

    with mock.patch("time.monotonic", side_effect=lambda: monotonic() + ahead_s[0]):
        hour = timedelta(hours=1)
        fit(run_dir, Slow, max_length=("batches", 20), checkpoint_period=hour, checkpoint_policy="none")


@pytest.mark.parametrize(
    ("batch_minutes", "save_minutes", "expected"),
    [(7, 14, [9, 18, 20]), (60, 60, list(range(1, 21)))],
)
def test_one_is_due_at_the_first_batch_after_its_time_by_the_clock_of_the_chief(
    batch_minutes: int, save_minutes: int, expected: list[int], two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(train_on_a_clock, str(tmp_path), batch_minutes, save_minutes)
    assert saved_steps(tmp_path) == expected


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        ({"checkpoint_period": timedelta()}, "fit.checkpoint_period.seconds", "must be more than 0"),
        ({"max_length": Batch(0)}, "fit.max_length.batches", "must be 1 or more"),
    ],
)
def test_fit_refuses_what_hyperparameters_may_not_be(arguments: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Trainer(None, None).fit(**{"max_length": Batch(3), **arguments})
    assert [problem.key for problem in refused.value.problems] == [key]
