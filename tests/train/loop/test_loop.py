"""The loop as a trial sees it: what is due after which batch or by the clock, epochs, metrics, checkpoints, errors."""

from __future__ import annotations

import os
import random
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.harness.ranks import Ranks
from tests.package import checkpoints, damage, records
from tests.train.small import BATCHES_PER_EPOCH, fit, hyperparameters, linear_trial, saved_steps

HOOKS = {
    "on_training_epoch_start": "epoch start",
    "on_training_epoch_end": "epoch end",
    "on_validation_end": "validation",
    "on_checkpoint_upload_end": "checkpoint",
    "on_training_workload_end": "report",
}


def train(run_dir: Path, **fit_arguments: Any) -> list[Any]:
    """In a rank: train a linear model; what was called."""
    from determined import pytorch

    calls: list[Any] = []

    def noted(word: str) -> Any:
        return lambda self, *given, **_: calls.append((word, *given) if word.startswith("epoch") else word)

    class Linear(linear_trial()):  # type: ignore[misc]
        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            calls.append((epoch_idx, batch_idx))
            return dict(super().train_batch(dataloader_iter, epoch_idx, batch_idx))

        def build_callbacks(self) -> dict[str, Any]:
            hooks = {hook: noted(word) for hook, word in HOOKS.items()}
            return {"noting": type("Noting", (pytorch.PyTorchCallback,), hooks)()}

    fit(run_dir, Linear, **fit_arguments)
    return calls


def is_due(unit: tuple[str, Any] | None, batch: int) -> bool:
    """The documentation of ``fit``: a period counts batches or epochs from the start; a schedule lists them."""
    if unit is None:
        return False
    kind, value = unit
    if kind == "epochs" and batch % BATCHES_PER_EPOCH:
        return False
    count = batch // BATCHES_PER_EPOCH if kind == "epochs" else batch
    return count in value if isinstance(value, list) else count % value == 0


def drawn_schedules(seed: int) -> list[dict[str, Any]]:
    """Lengths and periods of ``fit``; ``stop`` is where a first start ends, from which a second one goes on."""
    draw, found = random.Random(seed), []
    for number in range(8):
        length = draw.choice([("batches", draw.randint(1, 14)), ("epochs", draw.randint(1, 2))])
        schedule: dict[str, Any] = {"max_length": length, "stop": draw.randint(1, 4) if number % 2 else None}
        for name in ("validation_period", "checkpoint_period", "reporting_period"):
            kind = draw.choice(["batches", "epochs"])
            values = [draw.randint(1, 6), draw.randint(1, 3), sorted(draw.sample(range(1, 12), 3))]
            schedule[name] = (kind, draw.choice(values))
        if draw.random() < 0.3:
            schedule["validation_period"] = schedule["checkpoint_period"] = None
        found.append(schedule)
    return found


def train_each(folder: Path, schedules: list[dict[str, Any]]) -> None:
    """In a rank: train as each of them says, some in two starts."""
    for number, schedule in enumerate(schedules):
        run_dir, periods = folder / str(number), {**schedule, "checkpoint_policy": "none"}
        if (stop := periods.pop("stop")) is not None:
            fit(run_dir, linear_trial(), **{**periods, "max_length": ("batches", stop)})
            periods["latest_checkpoint"] = checkpoints(run_dir)[0].name
        fit(run_dir, linear_trial(), **periods)


def test_batches_are_counted_as_the_documentation_says(one_rank: Ranks, tmp_path: Path) -> None:
    """What is due is due after its batch, at the end everything is, and a second start counts on from the first."""
    schedules = drawn_schedules(5)
    one_rank.run(train_each, tmp_path, schedules)
    for number, schedule in enumerate(schedules):
        kind, value = schedule["max_length"]
        length = max(value * (BATCHES_PER_EPOCH if kind == "epochs" else 1), schedule["stop"] or 0)
        ends, run_dir = {length, schedule["stop"]}, tmp_path / str(number)
        for name, found in {
            "reporting_period": [step for step, _ in records(run_dir, "training")],
            "validation_period": [step for step, _ in records(run_dir, "validation")],
            "checkpoint_period": saved_steps(run_dir),
        }.items():
            due = [step for step in range(1, length + 1) if step in ends or is_due(schedule[name], step)]
            assert found == due, (name, schedule)


def test_epochs_are_real_epochs(one_rank: Ranks, tmp_path: Path) -> None:
    """Each with its own number in the callbacks and in ``train_batch``; what is due comes after its batch."""
    periods = {"validation_period": ("epochs", 1), "reporting_period": ("batches", 4)}
    [calls] = one_rank.run(train, tmp_path, max_length=("epochs", 2), checkpoint_policy="none", **periods)
    first = [("epoch start", 0), *((0, i) for i in range(4)), "report", (0, 4), ("epoch end", 0)]
    second = [("epoch start", 1), *((1, i) for i in range(5, 8)), "report", (1, 8), (1, 9), ("epoch end", 1)]
    assert calls == [*first, "validation", *second, "report", "validation", "checkpoint"]


def test_what_is_reported(two_ranks: Ranks, tmp_path: Path) -> None:
    """Numbers only: the ranks' memory, learning rate, gradient norm. TensorBoard has them under the same names."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_ranks.run(train, tmp_path, max_length=("batches", 4), reporting_period=("batches", 2))
    reports = records(tmp_path, "training")
    assert [report["batches"] for _, report in reports] == [step for step, _ in reports] == [2, 4]
    for _, report in reports:
        assert report["lr"] == 0.01
        assert report["grad_norm"] > 0
        assert 1 / 16 < report["peak_memory_gib_min"] <= report["peak_memory_gib"] < 64
        assert {type(value) for value in report.values()} <= {int, float}
        assert "epochs" not in report
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for group in ("training", "validation"):
        for name in records(tmp_path, group)[0][1].keys() - {"batches"}:
            found = [(event.step, event.value) for event in events.Scalars(f"{group}/{name}")]
            expected = [(step, pytest.approx(report[name])) for step, report in records(tmp_path, group)]
            assert found == expected, name


def train_on_a_clock(run_dir: Path) -> None:
    """In a rank: twenty batches; by the chief's clock each takes 7 minutes, and a checkpoint 14."""
    os.environ["DETERMINED_DS_HANG_TIMEOUT"] = "0"
    real, ahead_s = time.monotonic, [0.0]

    class Slow(linear_trial()):  # type: ignore[misc]
        def takes(self, minutes: float) -> None:
            ahead_s[0] += 60 * minutes if self.context.distributed.rank == 0 else 0

        def train_batch(self, *given: Any) -> Any:
            self.takes(7)
            return super().train_batch(*given)

        def save(self, *given: Any) -> None:
            super().save(*given)
            self.takes(14)

    how: dict[str, Any] = {"max_length": ("batches", 20), "checkpoint_period": timedelta(hours=1)}
    with mock.patch("time.monotonic", side_effect=lambda: ahead_s[0] + real()):
        fit(run_dir, Slow, checkpoint_policy="none", **how)


def test_a_checkpoint_is_due_at_the_first_batch_after_its_time_by_the_clock_of_the_chief(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(train_on_a_clock, tmp_path)
    assert saved_steps(tmp_path) == [9, 18, 20]


@pytest.mark.parametrize(
    ("policy", "smaller_is_better", "more", "expected"),
    [
        ("best", True, {}, [2, 4, 6]),
        ("best", False, {}, [2, 6]),
        # The first validation stays the best; what falls due with it is its checkpoint, and is never pruned.
        ("none", False, {"checkpoint_period": ("batches", 2), "save_total_limit": 2}, [2, 6]),
    ],
)
def test_checkpoint_policies_work_without_a_cluster(
    one_rank: Ranks, tmp_path: Path, policy: str, smaller_is_better: bool, more: Any, expected: list[int]
) -> None:
    """The loss falls: by ``smaller_is_better`` each validation is the best so far, or the first stays it."""
    searcher = {"metric": "validation_loss", "smaller_is_better": smaller_is_better}
    arguments = {"max_length": ("batches", 6), "validation_period": ("batches", 2), **more}
    one_rank.run(train, tmp_path, searcher=searcher, checkpoint_policy=policy, **arguments)
    assert saved_steps(tmp_path) == expected


def test_damaged_checkpoints_are_pruned_first_and_deleted_ones_do_not_count(
    one_rank: Ranks, tmp_path: Path
) -> None:
    """Found as a run goes on; the limit is of those that are there."""
    arguments = {"checkpoint_period": ("batches", 2), "checkpoint_policy": "none"}
    one_rank.run(train, tmp_path, max_length=("batches", 8), **arguments)
    newest, good, deleted, _ = checkpoints(tmp_path)
    (newest / "trial_state.json").write_text("{}")
    shutil.rmtree(deleted)
    arguments |= {"latest_checkpoint": good.name, "save_total_limit": 3}
    one_rank.run(train, tmp_path, max_length=("batches", 8), **arguments)
    assert not newest.exists()
    assert saved_steps(tmp_path) == [2, 6, 8]
    assert [damage(checkpoint) for checkpoint in checkpoints(tmp_path)] == [None] * 3


def train_wrongly(run_dir: Path, wrong: str, resume: str | None = None) -> str:
    """In a rank: four batches, and a validation at the end; what it raised."""

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    class Line(linear_trial()):  # type: ignore[misc]
        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            if wrong == "raises":
                raise ArithmeticError("no such number")
            if wrong == "chief's report":
                self.context._core.train.report_validation_metrics = full_disk  # Determined's own
            metrics = super().evaluate_batch(dataloader_iter, batch_idx)
            return {"other": metrics["validation_loss"]} if wrong == "other metric" else metrics

    how: dict[str, Any] = {"max_length": ("batches", 4), "latest_checkpoint": resume}
    try:
        fit(run_dir, Line, hparams=hyperparameters(1), searcher={"metric": "validation_loss"}, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_the_weights_are_saved_before_an_error_at_the_end_and_the_validation_is_made_up_for(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """On every rank. The run was trained to its end: going on with it validates, and trains nothing."""
    other = "ConfigError: searcher.metric = 'validation_loss': the trial reports no metric"
    for wrong, said in {
        "other metric": (other, other),
        "chief's report": ("OSError: [Errno 28]", "ChiefFailed: rank 0: OSError(28"),
        "raises": ("ArithmeticError: no such number",) * 2,
    }.items():
        run_dir = tmp_path / wrong
        errors = two_ranks.run(train_wrongly, run_dir, wrong)
        assert all(error.startswith(start) for error, start in zip(errors, said, strict=True)), errors
        assert saved_steps(run_dir) == [4]
    [checkpoint] = checkpoints(run_dir)
    assert two_ranks.run(train_wrongly, run_dir, "nothing", checkpoint.name) == ["trained"] * 2
    assert [step for step, _ in records(run_dir, "training")] == [4]
    assert [step for step, _ in records(run_dir, "validation")] == [4]
