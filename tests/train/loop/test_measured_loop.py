"""``measure_throughput``: a trial that is measured trains as ever; its steps, memory and losses are measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import checkpoints, records
from tests.train.small import fit, hyperparameters, linear_trial

PARAMETERS = (4 * 4 + 4) + (4 * 2 + 2)
WARMUP, STEPS = 2, 5


def trial_class(kind: str) -> Any:
    """A small model with dropout, made where deepspeed is loaded: in a rank. ``stopping`` wants to end at once."""
    import torch

    from determined_ds import PipelineTrial

    def layers() -> list[torch.nn.Module]:
        return [torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2)]

    class Replicated(linear_trial()):  # type: ignore[misc]
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*layers())

        def train_batch(self, *given: Any) -> Any:
            if kind == "stopping":
                self.context.set_stop_requested(True)
            return super().train_batch(*given)

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            assert kind == "trained", "it is validated"
            return super().evaluate_batch(dataloader_iter, batch_idx)

        def tokens_per_sample(self) -> int:
            return 3

    class Piped(PipelineTrial):
        def build_layers(self) -> list[Any]:
            return layers()

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

        def build_training_data_loader(self) -> Any:
            return self.training_loader([(torch.ones(4), torch.ones(2))] * 64)

        build_validation_data_loader = build_training_data_loader

    return Piped if kind == "piped" else Replicated


def measured(
    run_dir: str, kind: str = "replicated", hparams: dict[str, Any] | None = None, **more: Any
) -> Any:
    """In a rank: measure a trial."""
    from determined_ds import measure_throughput, open_context

    lengths = {"steps": STEPS, "warmup": WARMUP, **more}
    with open_context(hparams=hparams or hyperparameters(), run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_class(kind)(context)
        return measure_throughput(trial, context, **lengths)


def trained(run_dir: str) -> None:
    """In a rank: train the same trial as it is always trained."""
    periods = {"reporting_period": ("batches", 1), "checkpoint_policy": "none"}
    fit(run_dir, trial_class("trained"), max_length=("batches", WARMUP + STEPS), **periods)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def rows(two_ranks: Ranks, run_dir: Path) -> list[Any]:
    """What each of two ranks measured, ZeRO 0."""
    found: list[Any] = two_ranks.run(measured, str(run_dir))
    return found


def test_its_losses_are_those_of_training_to_the_bit(
    rows: list[Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    """Dropout and shuffling included; the warm-up is training, too."""
    two_ranks.run(trained, str(tmp_path))
    losses = [report["loss"] for _, report in records(tmp_path, "training")]
    assert len(losses) == WARMUP + STEPS
    assert len(set(losses)) == len(losses)
    [repetition] = rows[0].repetitions
    assert list(repetition.losses) == losses


def test_nothing_is_saved_or_validated_and_the_row_says_what_ran(rows: list[Any], run_dir: Path) -> None:
    """The trial would refuse it."""
    assert checkpoints(run_dir) == records(run_dir, "validation") == []
    row = rows[0]
    assert (row.status, row.reason, row.slots, row.name) == ("measured", "", 2, "ZeRO 0")
    assert (row.zero_stage, row.replicas, row.pipe_parallel_size) == (0, 2, 1)
    assert (row.micro_batch_size, row.accumulation, row.samples_per_step) == (4, 1, 8)
    assert (row.precision, row.tokens_per_sample, row.bubble) == ("fp32", 3, None)


def test_a_pipelines_bubble_beside_the_ideal_one(two_ranks: Ranks, tmp_path: Path) -> None:
    """(p-1)/(m+p-1) of two stages and four micro-batches; each pass of the recorded step once, in its order."""
    hparams = {**hyperparameters(gradient_accumulation_steps=4), "pipe_parallel_size": 2}
    [row, _] = two_ranks.run(measured, str(tmp_path), "piped", hparams)
    assert row.status == "measured"
    assert (row.pipe_parallel_size, row.accumulation, row.micro_batch_size) == (2, 4, 2)
    assert row.bubble_ideal == pytest.approx(1 / 5)
    assert 0 < row.bubble < 1
    assert len(row.losses) == WARMUP + STEPS
    step = row.repetitions[0].pipeline_step
    passes = [
        [span for span in own if span.op in order]
        for own, order in zip(step.spans, step.pipeline.orders(), strict=True)
    ]
    assert [[span.op for span in own] for own in passes] == step.pipeline.orders()
    assert all(before.end <= after.start for own in passes for before, after in itertools.pairwise(own))


def test_asked_to_stop_it_ends_with_what_it_has(two_ranks: Ranks, tmp_path: Path) -> None:
    """Here after its first step, in the warm-up, which the trial itself asks for: nothing is timed yet."""
    for row in two_ranks.run(measured, str(tmp_path), "stopping"):
        assert (row.status, row.reason) == ("stopped", f"stopped after 1 of {WARMUP + STEPS} steps")
        assert len(row.repetitions[0].step_seconds) == 0
        assert len(row.losses) == 1


def test_however_short_the_warm_up_all_states_are_seen(two_ranks: Ranks, tmp_path: Path) -> None:
    """Parameters, gradients and Adam's two moments in fp32; the first step makes the optimizer's."""
    for row in two_ranks.run(measured, str(tmp_path), warmup=0, steps=3):
        assert len(row.repetitions[0].step_seconds) == 3
        assert row.repetitions[0].model_state_bytes_by_rank == (16 * PARAMETERS,) * 2
