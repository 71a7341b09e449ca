"""A trial that is measured trains as it always does; what is measured is its steps, its memory and its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from determined_ds.profile.analysis import analyse
from determined_ds.protocol.profile_files import traces_in
from determined_ds.protocol.run_dir import STEP_GROUP
from determined_ds.report.repetition import PARTS
from determined_ds.report.results import MEASURED, STOPPED, Row
from tests.ranks import Ranks

GLOBAL_BATCH_SIZE, NUM_SAMPLES = 8, 64
FEATURES, OUTPUTS = 12, 2
PARAMETERS = (FEATURES + OUTPUTS) * (FEATURES + 1)
WARMUP, STEPS = 2, 5
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


def hyperparameters(**ds: Any) -> dict[str, Any]:
    ds_config = {"zero_optimization": {"stage": 0}, "optimizer": OPTIMIZER, **ds}
    return {"global_batch_size": GLOBAL_BATCH_SIZE, "deepspeed_config": ds_config}


def trial_class(kind: str) -> Any:
    """A small model with dropout, made where deepspeed is loaded: in a rank. ``stopping`` wants to end at once."""
    import torch

    from determined_ds import DataParallelTrial, PipelineTrial
    from determined_ds.trial.base import ReconciledTrial

    class Data(ReconciledTrial):
        def prepare(self) -> None:
            inputs = torch.randn(NUM_SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
            self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :OUTPUTS])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(self.data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(self.data)

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            assert kind == "trained", "it is validated"
            return super().evaluate_batch(dataloader_iter, batch_idx)

    def block() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Dropout(0.1))

    class Replicated(Data, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(block(), torch.nn.Linear(FEATURES, OUTPUTS))

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(model(inputs), targets)

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            if kind == "stopping":
                self.context.set_stop_requested(True)
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

        def tokens_per_sample(self) -> int:
            return 3

    class Piped(Data, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [block(), block(), block(), torch.nn.Linear(FEATURES, OUTPUTS)]

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

    return Piped if kind == "piped" else Replicated


def measured(
    run_dir: str, kind: str = "replicated", hparams: dict[str, Any] | None = None, **more: Any
) -> Row:
    """In a rank: measure a trial."""
    from determined.pytorch import Batch

    from determined_ds import measure_throughput, open_context

    period = more.pop("period", None)
    lengths = {"steps": STEPS, "warmup": WARMUP, **more}
    with open_context(hparams=hparams or hyperparameters(), run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_class(kind)(context)
        validation_period = None if period is None else Batch(period)
        return measure_throughput(trial, context, validation_period=validation_period, **lengths)


def trained(run_dir: str) -> None:
    """In a rank: train the same trial as it is always trained."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    with open_context(hparams=hyperparameters(), run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_class("trained")(context)
        Trainer(trial, context).fit(
            max_length=Batch(WARMUP + STEPS), reporting_period=Batch(1), checkpoint_policy="none"
        )


def records_in(run_dir: Path, group: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["group"] == group]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def rows(two_ranks: Ranks, run_dir: Path) -> list[Row]:
    """What each of two ranks measured, ZeRO 0."""
    found: list[Row] = two_ranks.run(measured, str(run_dir))
    return found


# ----------------------------------------------------------------------------------------- the same training


def test_its_losses_are_those_of_training_to_the_bit(
    rows: list[Row], two_ranks: Ranks, tmp_path: Path
) -> None:
    """Dropout and shuffling included; the warm-up is training, too."""
    two_ranks.run(trained, str(tmp_path))
    losses = [record["metrics"]["loss"] for record in records_in(tmp_path, "training")]
    assert len(losses) == WARMUP + STEPS
    assert len(set(losses)) == len(losses)
    [repetition] = rows[0].repetitions
    assert list(repetition.losses) == losses


def test_steps_that_are_taken_apart_follow_those_that_count(
    rows: list[Row], two_ranks: Ranks, tmp_path: Path
) -> None:
    """They are trained after them, and recorded; what was measured before is as without them."""
    found = two_ranks.run(measured, str(tmp_path), parts=2)
    [repetition], [without] = found[0].repetitions, rows[0].repetitions
    assert found[0].status == MEASURED
    assert repetition.losses == without.losses
    assert len(repetition.step_seconds) == STEPS
    assert repetition.model_state_bytes_by_rank == without.model_state_bytes_by_rank
    profile = analyse(traces_in(tmp_path))
    assert [len(rank.steps) for rank in profile.ranks] == [2, 2]
    assert profile.ranks[0].steps[0].batch == WARMUP + STEPS + 2
    assert set(profile.seconds) == set(PARTS)


def test_nothing_is_saved_or_validated(rows: list[Row], run_dir: Path) -> None:
    """The trial would refuse it; what is reported as validation is what was measured."""
    assert rows
    assert list(run_dir.glob("checkpoints/*")) == []
    [report] = records_in(run_dir, "validation")
    assert report["steps_completed"] == WARMUP + STEPS
    assert {"samples_per_second", "tokens_per_second", "step_seconds", "peak_memory_gib", "loss"} < set(
        report["metrics"]
    )
    assert report["metrics"]["samples_per_second"] == pytest.approx(rows[0].samples_per_second)


# ---------------------------------------------------------------------------------------- what is measured


def test_every_rank_gets_the_same_but_for_its_own_start(rows: list[Row]) -> None:
    first, second = (row.repetitions[0] for row in rows)
    assert first.step_seconds == second.step_seconds
    assert first.losses == second.losses
    assert first.peak_memory_bytes_by_rank == second.peak_memory_bytes_by_rank
    assert len(first.peak_memory_bytes_by_rank) == 2
    assert min(first.peak_memory_bytes_by_rank) > 2**26
    assert first.start_seconds > 0


def test_the_warm_up_does_not_count(rows: list[Row], run_dir: Path) -> None:
    """A step's time is that of the slowest rank, so no less than what the first rank noted of it."""
    steps = records_in(run_dir, STEP_GROUP)
    assert [record["steps_completed"] for record in steps] == list(range(1, WARMUP + STEPS + 1))
    noted = [record["metrics"]["step_seconds"] for record in steps]
    [repetition] = rows[0].repetitions
    assert repetition.warmup == WARMUP
    assert len(repetition.step_seconds) == STEPS
    for seconds, own in zip(repetition.step_seconds, noted[WARMUP:], strict=True):
        assert seconds >= own > 0


def test_the_row_says_what_ran(rows: list[Row]) -> None:
    row = rows[0]
    assert (row.status, row.reason, row.slots, row.name) == (MEASURED, "", 2, "ZeRO 0")
    assert (row.zero_stage, row.replicas, row.pipe_parallel_size) == (0, 2, 1)
    assert (row.micro_batch_size, row.accumulation, row.samples_per_step) == (4, 1, GLOBAL_BATCH_SIZE)
    assert (row.precision, row.tokens_per_sample) == ("fp32", 3)
    assert row.bubble is None


def test_model_states_by_hand(rows: list[Row]) -> None:
    """Parameters, gradients and Adam's two moments in fp32, all of them on each of two ranks."""
    for row in rows:
        assert row.repetitions[0].model_state_bytes_by_rank == (16 * PARAMETERS,) * 2


def test_under_zero_1_each_rank_has_half_of_the_moments(two_ranks: Ranks, tmp_path: Path) -> None:
    """And of the parameters in the optimizer; but for padding, and whole gradients."""
    hparams = hyperparameters(zero_optimization={"stage": 1})
    [row, _] = two_ranks.run(measured, str(tmp_path), hparams=hparams)
    for size in row.repetitions[0].model_state_bytes_by_rank:
        assert 8 * PARAMETERS < size < 16 * PARAMETERS


def test_a_pipelines_bubble_beside_the_ideal_one(two_ranks: Ranks, tmp_path: Path) -> None:
    """(p-1)/(m+p-1) of two stages and four micro-batches."""
    hparams = {**hyperparameters(gradient_accumulation_steps=4), "pipe_parallel_size": 2}
    [row, _] = two_ranks.run(measured, str(tmp_path), "piped", hparams)
    assert row.status == MEASURED
    assert (row.pipe_parallel_size, row.accumulation, row.micro_batch_size) == (2, 4, 2)
    assert row.bubble_ideal == pytest.approx(1 / 5)
    assert row.bubble is not None
    assert 0 < row.bubble < 1
    assert len(row.losses) == WARMUP + STEPS


# --------------------------------------------------------------------------------------- ends, and reports


@pytest.mark.parametrize(("warmup", "timed"), [(0, 1), (2, 0)])
def test_asked_to_stop_it_ends_with_what_it_has(
    warmup: int, timed: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Here after its first step, which the trial itself asks for; in the warm-up nothing is timed yet."""
    for row in two_ranks.run(measured, str(tmp_path), "stopping", warmup=warmup):
        assert row.status == STOPPED
        assert row.reason == f"stopped after 1 of {warmup + STEPS} steps"
        assert len(row.repetitions[0].step_seconds) == timed
        assert len(row.losses) == 1


def test_a_search_is_told_on_the_way(two_ranks: Ranks, tmp_path: Path) -> None:
    """As often as it wants to judge; of the warm-up there is nothing to tell."""
    two_ranks.run(measured, str(tmp_path), period=2)
    reports = records_in(tmp_path, "validation")
    assert [report["steps_completed"] for report in reports] == [4, 6, 7]
    for report in reports:
        assert report["metrics"]["samples_per_second"] > 0
        assert report["metrics"]["batches"] == report["steps_completed"]


@pytest.mark.parametrize("warmup", [0, 1])
def test_however_short_the_warm_up_all_states_are_seen(warmup: int, two_ranks: Ranks, tmp_path: Path) -> None:
    """The first step makes the optimizer's: they are looked for in the second."""
    for row in two_ranks.run(measured, str(tmp_path), warmup=warmup, steps=3):
        assert len(row.repetitions[0].step_seconds) == 3
        assert row.repetitions[0].model_state_bytes_by_rank == (16 * PARAMETERS,) * 2
