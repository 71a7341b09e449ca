"""A validation that is not finite: never the best, never kept for it, and a reason to stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.protocol.best import is_better, not_finite
from determined_ds.protocol.checkpoint_files import checkpoints_in
from tests.ranks import Ranks
from tests.runtime.loop.test_loop import hyperparameters

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "best", "smaller", "expected"),
    [
        (1.0, None, True, True),
        (1.0, 2.0, True, True),
        (1.0, 2.0, False, False),
        (1.0, 1.0, True, False),
        (NAN, None, True, False),
        (NAN, 2.0, True, False),
        (INF, None, False, False),
        (-INF, 2.0, True, False),
        (9.0, NAN, True, True),
        (9.0, "NaN", True, True),
        (torch.tensor(1.0), np.float32(2.0), True, True),
        ([1.0], None, True, False),
        ("NaN", None, True, False),
    ],
)
def test_what_is_not_finite_is_never_better_and_never_the_best(
    value: Any, best: Any, smaller: bool, expected: bool
) -> None:
    assert is_better(value, best, smaller_is_better=smaller) is expected


def test_names_of_metrics_that_are_not_finite() -> None:
    metrics = {"a": NAN, "b": 1.0, "c": torch.tensor(INF), "d": [NAN], "e": torch.tensor([NAN, NAN])}
    assert not_finite(metrics) == ["a", "c"]


def train(
    run_dir: str, values: dict[int, Any], resume: str | None = None, length: int = 10, **fit: Any
) -> str:
    """In a rank: validate every two batches, to the given numbers; returns what was raised."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, TrainingError, open_context
    from tests.runtime.loop.test_loop import trial_class

    class Told(trial_class()):  # type: ignore[misc]
        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            next(dataloader_iter)
            return {"score": values[self.context._current_batch_idx + 1], "other": 1.0}

    searcher = {"metric": "score", "smaller_is_better": True}
    with open_context(
        hparams=hyperparameters(), exp_conf={"searcher": searcher}, run_dir=run_dir, accelerator="cpu"
    ) as context:
        try:
            Trainer(Told(context), context).fit(
                max_length=Batch(length), validation_period=Batch(2), latest_checkpoint=resume, **fit
            )
        except TrainingError as error:
            return str(error)
    return ""


def steps_of(run_dir: Path) -> list[int]:
    return sorted(checkpoint.steps_completed for checkpoint in checkpoints_in(run_dir / "checkpoints"))


VALUES = {2: NAN, 4: 3.0, 6: NAN, 8: 5.0, 10: 4.0}


def test_the_first_finite_validation_beats_one_that_was_not(one_rank: Ranks, tmp_path: Path) -> None:
    """A checkpoint for batch 4, which is the best to the end, and is kept; none for a NaN."""
    assert one_rank.run(train, str(tmp_path), VALUES, stop_on_nan=False, save_total_limit=2) == [""]
    assert steps_of(tmp_path) == [4, 10]


def test_a_resumed_run_knows_the_same_best(one_rank: Ranks, tmp_path: Path) -> None:
    """``metrics.jsonl`` has the NaN as a text, and the uninterrupted run has it as a number."""
    run_dir = str(tmp_path)
    one_rank.run(train, run_dir, VALUES, length=8, stop_on_nan=False, save_total_limit=2)
    newest = checkpoints_in(tmp_path / "checkpoints")[0]
    one_rank.run(train, run_dir, VALUES, resume=newest.uuid, stop_on_nan=False, save_total_limit=2)
    assert steps_of(tmp_path) == [4, 10]


def test_stop_on_nan_stops_at_it_after_reporting_it(one_rank: Ranks, tmp_path: Path) -> None:
    """No checkpoint is made of those weights; named are the metric, the batch and the last good checkpoint."""
    values = {2: 3.0, 4: NAN}
    [said] = one_rank.run(train, str(tmp_path), values)
    [kept] = checkpoints_in(tmp_path / "checkpoints")
    assert kept.steps_completed == 2
    assert (
        f"score was not finite in the validation at batch 4: the last good checkpoint is {kept.uuid}" in said
    )
    assert "fit.stop_on_nan: false" in said
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["group"], last["metrics"]["score"]) == ("validation", "NaN")


def test_it_is_warned_of_where_the_run_goes_on(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(train, str(tmp_path), {2: INF}, length=2, stop_on_nan=False)
    assert steps_of(tmp_path) == [2]  # at the end, whatever its metric
    assert "warning: score was not finite in the validation at batch 2" in one_rank.said(0)
