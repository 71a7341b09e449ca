"""A small regression as a trial of any kind, right unless a test gives it other methods. Runs in ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.train.small import fit

GLOBAL_BATCH_SIZE = 8


class Regression(torch.utils.data.Dataset[Any]):
    """Sample ``i``: four numbers, and one that is made of them."""

    def __init__(self, size: int = 32) -> None:
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
        self.targets = 2 * self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def error_of(errors: torch.Tensor) -> torch.Tensor:
    return errors.square().mean()


def layers() -> list[torch.nn.Module]:
    """The same on every rank, whatever was drawn before; an odd number of parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1)]


def trial_class(kind: str = "", *mixins: Any, **methods: Any) -> Any:
    """Of one model, a ``pipeline`` or two ``engines``; made in a rank. Methods come before its own."""
    from determined_ds import DataParallelTrial, PipelineTrial, SeveralEnginesTrial

    class Data:
        training_loader: Any
        validation_loader: Any

        def build_training_data_loader(self) -> Any:
            return self.training_loader(Regression())

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(Regression())

    class MyTrial(Data, DataParallelTrial):
        def build_model(self) -> Any:
            return torch.nn.Sequential(*layers())

        def loss(self, model: Any, batch: Any) -> Any:
            inputs, targets = batch
            return error_of(model(inputs.to(next(model.parameters()).dtype)).float() - targets)

    class MyPipeline(Data, PipelineTrial):
        def build_layers(self) -> Any:
            return layers()

        def loss(self, outputs: Any, targets: Any) -> Any:
            return error_of(outputs - targets)

    class MyEngines(Data, SeveralEnginesTrial):
        def build_models(self) -> Any:
            return {name: torch.nn.Sequential(*layers()) for name in ("writer", "critic")}

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
            batches = [next(dataloader_iter) for _ in range(self.resolved.batch.accumulation)]
            for engine in self.engines.values():
                for inputs, targets in batches:
                    loss = error_of(engine(inputs) - targets)
                    engine.backward(loss)
                    engine.step()
            return {"loss": loss.detach()}

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            return {"validation_loss": error_of(self.engine(next(dataloader_iter)[0]))}

    base: Any = {"pipeline": MyPipeline, "engines": MyEngines}.get(kind, MyTrial)
    return type(base.__name__, (*mixins, base), methods)


def train(run_dir: Path | None, trial: Any, hparams: Mapping[str, Any], *, steps: int, **more: Any) -> Any:
    """In a rank: train such a trial (see ``fit``); each step is reported, and the global batch size is 8."""
    given = {"global_batch_size": GLOBAL_BATCH_SIZE, **hparams}
    lengths = {"max_length": ("batches", steps), "reporting_period": ("batches", 1)}
    return fit(run_dir, trial, hparams=given, **{**lengths, **more})
