"""What goes wrong in a validation costs no weights: they are saved before the error is raised, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.protocol.checkpoint_files import checkpoints_in
from tests.ranks import Ranks


def trial_class(wrong: str) -> Any:
    from determined_ds import DataParallelTrial

    class Line(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 1)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(model(inputs), targets)

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            if wrong == "raises":
                raise ArithmeticError("no such number")
            metrics = super().evaluate_batch(dataloader_iter, batch_idx)
            return {"other": metrics["validation_loss"]} if wrong == "other metric" else metrics

        def build_training_data_loader(self) -> Any:
            return self.training_loader(self._data(32))

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(self._data(8))

        def _data(self, count: int) -> Any:
            inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
            return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    return Line


def train(run_dir: str, wrong: str, resume: str | None = None) -> str:
    """In a rank: four batches, and a validation at the end; returns what it raised."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from determined_ds.runtime import local_core as local

    ds_config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    exp_conf = {"searcher": {"name": "single", "metric": "validation_loss"}}
    with open_context(hparams=hparams, exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_class(wrong)(context)
        if wrong == "chief's report":

            def full_disk(*_: Any, **__: Any) -> None:
                raise OSError(28, "No space left on device")

            assert isinstance(context._core.train, local.LocalTrainContext)
            context._core.train.report_validation_metrics = full_disk
        try:
            Trainer(trial, context).fit(max_length=Batch(4), latest_checkpoint=resume)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("other metric", ["ConfigError: searcher.metric = 'validation_loss': the trial reports other"] * 2),
        ("raises", ["ArithmeticError: no such number"] * 2),
        ("chief's report", ["OSError: [Errno 28]", "ChiefFailed: rank 0: OSError(28"]),
    ],
)
def test_the_weights_are_saved_before_a_complaint_at_the_end(
    wrong: str, told: list[str], two_ranks: Ranks, tmp_path: Path
) -> None:
    errors = two_ranks.run(train, str(tmp_path), wrong)
    assert all(error.startswith(start) for error, start in zip(errors, told, strict=True)), errors
    [checkpoint] = checkpoints_in(tmp_path / "checkpoints")
    assert checkpoint.steps_completed == 4


def test_a_validation_that_failed_at_the_end_is_made_up_for(two_ranks: Ranks, tmp_path: Path) -> None:
    """The run was trained to its end: going on with it validates, and trains nothing."""
    two_ranks.run(train, str(tmp_path), "raises")
    [checkpoint] = checkpoints_in(tmp_path / "checkpoints")
    assert two_ranks.run(train, str(tmp_path), "nothing", checkpoint.uuid) == ["trained"] * 2
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["group"], r["steps_completed"]) for r in records] == [("training", 4), ("validation", 4)]
