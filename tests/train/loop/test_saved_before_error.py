"""What goes wrong in a validation costs no weights: they are saved before the error is raised, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import checkpoints, records
from tests.train.small import fit, hyperparameters, linear_trial, saved_steps


def train(run_dir: str, wrong: str, resume: str | None = None) -> str:
    """In a rank: four batches, and a validation at the end; returns what it raised."""

    class Line(linear_trial()):  # type: ignore[misc]
        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            if wrong == "raises":
                raise ArithmeticError("no such number")
            metrics = super().evaluate_batch(dataloader_iter, batch_idx)
            return {"other": metrics["validation_loss"]} if wrong == "other metric" else metrics

        def build_callbacks(self) -> Any:
            if wrong == "chief's report":
                self.context._core.train.report_validation_metrics = full_disk  # Determined's own
            return {}

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    searcher = {"name": "single", "metric": "validation_loss"}
    length = ("batches", 4)
    try:
        fit(
            run_dir,
            Line,
            hparams=hyperparameters(1),
            searcher=searcher,
            max_length=length,
            latest_checkpoint=resume,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            "other metric",
            ["ConfigError: searcher.metric = 'validation_loss': the trial reports no metric"] * 2,
        ),
        ("chief's report", ["OSError: [Errno 28]", "ChiefFailed: rank 0: OSError(28"]),
    ],
)
def test_the_weights_are_saved_before_an_error_at_the_end(
    wrong: str, told: list[str], two_ranks: Ranks, tmp_path: Path
) -> None:
    errors = two_ranks.run(train, str(tmp_path), wrong)
    assert all(error.startswith(start) for error, start in zip(errors, told, strict=True)), errors
    assert saved_steps(tmp_path) == [4]


def test_a_validation_that_failed_at_the_end_is_made_up_for(two_ranks: Ranks, tmp_path: Path) -> None:
    """The run was trained to its end: going on with it validates, and trains nothing."""
    assert two_ranks.run(train, str(tmp_path), "raises") == ["ArithmeticError: no such number"] * 2
    (checkpoint,) = checkpoints(tmp_path)
    assert two_ranks.run(train, str(tmp_path), "nothing", checkpoint.name) == ["trained"] * 2
    assert [step for step, _ in records(tmp_path, "training")] == [4]
    assert [step for step, _ in records(tmp_path, "validation")] == [4]
