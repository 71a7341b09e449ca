"""``measure_throughput``: a trial that is measured trains as ever; its steps and losses are measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import checkpoints, records
from tests.trial.regression import train, trial_class

WARMUP, STEPS = 2, 5
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


def trial_of(kind: str) -> Any:
    """A small model with dropout, made where deepspeed is loaded: in a rank."""
    import torch

    def layers(*_: Any) -> list[Any]:
        return [torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)]

    class Replicated:
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*layers())

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            assert kind == "trained", "it is validated"
            return super().evaluate_batch(dataloader_iter, batch_idx)  # type: ignore[misc]

        def tokens_per_sample(self) -> int:
            return 3

    return trial_class(kind, build_layers=layers) if kind == "pipeline" else trial_class("", Replicated)


def measured(run_dir: Path, kind: str = "", **hparams: Any) -> Any:
    """In a rank: measure a trial."""
    from determined_ds import measure_throughput, open_context

    ds_config = {"optimizer": ADAM, "gradient_accumulation_steps": 4 if kind == "pipeline" else 1}
    given = {"global_batch_size": 8, "deepspeed_config": ds_config, **hparams}
    with open_context(hparams=given, run_dir=run_dir, accelerator="cpu") as context:
        return measure_throughput(trial_of(kind)(context), context, steps=STEPS, warmup=WARMUP)


def trained(run_dir: Path) -> None:
    """In a rank: train the same trial as it is always trained."""
    hparams = {"deepspeed_config": {"optimizer": ADAM}}
    train(run_dir, trial_of("trained"), hparams, steps=WARMUP + STEPS, checkpoint_policy="none")


def test_its_losses_are_those_of_training_to_the_bit_and_nothing_is_saved_or_validated(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Dropout and shuffling included; the warm-up is training, too. The row says what ran."""
    row, _ = two_ranks.run(measured, tmp_path / "measured")
    assert checkpoints(tmp_path / "measured") == records(tmp_path / "measured", "validation") == []
    two_ranks.run(trained, tmp_path / "trained")
    losses = [report["loss"] for _, report in records(tmp_path / "trained", "training")]
    assert len(set(losses)) == WARMUP + STEPS
    [repetition] = row.repetitions
    assert list(repetition.losses) == losses
    assert (row.status, row.reason, row.slots, row.name) == ("measured", "", 2, "ZeRO 0")
    assert (row.zero_stage, row.replicas, row.pipe_parallel_size) == (0, 2, 1)
    assert (row.micro_batch_size, row.accumulation, row.samples_per_step) == (4, 1, 8)
    assert (row.precision, row.tokens_per_sample, row.bubble) == ("fp32", 3, None)


def test_a_pipelines_bubble_beside_the_ideal_one(two_ranks: Ranks, tmp_path: Path) -> None:
    """(p-1)/(m+p-1) of two stages and four micro-batches; each pass of the recorded step once, in its order."""
    [row, _] = two_ranks.run(measured, tmp_path, "pipeline", pipe_parallel_size=2)
    assert row.status == "measured"
    assert (row.pipe_parallel_size, row.accumulation, row.micro_batch_size) == (2, 4, 2)
    assert row.bubble_ideal == pytest.approx(1 / 5)
    assert 0 < row.bubble < 1
    step = row.repetitions[0].pipeline_step
    orders = step.pipeline.orders()
    for own, order in zip(step.spans, orders, strict=True):
        passes = [span for span in own if span.op in order]
        assert [span.op for span in passes] == order
        assert all(before.end <= after.start for before, after in itertools.pairwise(passes))
