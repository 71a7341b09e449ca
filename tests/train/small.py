"""A small trial for tests of training, made in a rank, where DeepSpeed is loaded; and what its runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.package import checkpoints

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 40, 8
BATCHES_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH_SIZE
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}


def hyperparameters(stage: int = 0, **ds: Any) -> dict[str, Any]:
    """Of a training under a ZeRO stage; more keys of the DeepSpeed JSON."""
    ds_config = {"zero_optimization": {"stage": stage}, "optimizer": ADAM, **ds}
    return {"global_batch_size": GLOBAL_BATCH_SIZE, "deepspeed_config": ds_config}


def linear_trial() -> Any:
    """A linear model that learns to copy two of its four inputs."""
    from determined_ds import DataParallelTrial

    class Linear(DataParallelTrial):
        def prepare(self) -> None:
            inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
            self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 2)

        def loss(self, model: Any, batch: Any) -> Any:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(model(inputs), targets)

        def build_training_data_loader(self) -> Any:
            return self.training_loader(self.data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(self.data)

    return Linear


def fit(
    run_dir: str | Path | None,
    kind: Any,
    *,
    hparams: dict[str, Any] | None = None,
    searcher: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    engine: str = "deepspeed",
    **arguments: Any,
) -> Any:
    """In a rank: train a trial of this class, which is returned. A length or period may be ``("batches", 3)``."""
    from determined.pytorch import Batch, Epoch

    from determined_ds import Trainer, open_context

    kinds = {"batches": Batch, "epochs": Epoch}  # what goes to a rank by pickle is plain
    units = {k: kinds[v[0]](v[1]) if isinstance(v, tuple) else v for k, v in arguments.items()}
    with open_context(
        hparams=hparams or hyperparameters(),
        exp_conf={"searcher": searcher} if searcher else exp_conf,
        run_dir=run_dir,
        accelerator="cpu",
        engine=engine,
    ) as context:
        trial = kind(context)
        Trainer(trial, context).fit(**units)
    return trial


def saved_steps(run_dir: Path) -> list[int]:
    """The batches after which the complete checkpoints of a run were written."""
    found = (json.loads((path / "metadata.json").read_text()) for path in checkpoints(run_dir))
    return sorted(each["steps_completed"] for each in found)
