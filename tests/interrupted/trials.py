"""A trial that ends its own run at a point that a test names: ``KILL_AT`` by SIGKILL, ``STOP_AT`` as a user stops it.

A point is ``PLACE:BATCH``, and several may be named; the run ends at the first one that a rank comes to. It is run as
``tests.interrupted.trials:Victim`` or ``tests.interrupted.trials:PipelineVictim``.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from determined import pytorch

from determined_ds import DataLoader, DataParallelTrial, PipelineTrial, ReconciledTrial

FEATURES = 12
OUTPUTS = 2  # every parameter divides by two ranks: ZeRO's padding is never initialised, and would differ


class Noisy(torch.utils.data.Dataset):
    """Samples with noise of torch's own generator, drawn anew each time: an augmentation."""

    def __init__(self, count: int, noise: float) -> None:
        self.inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.inputs[index]
        return inputs + self.noise * torch.randn(FEATURES), inputs[:OUTPUTS]


class Remembering(pytorch.PyTorchCallback):
    """A callback with a state: the epochs it has seen, and the best loss, as early stopping keeps it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {"epochs": [], "best": float("inf")}

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.kept["epochs"].append(epoch_idx)

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.kept["best"] = min(self.kept["best"], metrics["validation_loss"])

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = copy.deepcopy(state_dict)


class _Mortal(ReconciledTrial):
    noise = 0.1

    def prepare(self) -> None:
        self.kill_at, self.stop_at = (
            {tuple(point.split(":")) for point in os.environ.get(name, "").split(",") if point}
            for name in ("KILL_AT", "STOP_AT")
        )
        self.remembering = Remembering()
        if "SLOW_WRITES" in os.environ:
            from tests.package import while_writing

            while_writing(lambda: time.sleep(float(os.environ["SLOW_WRITES"])))
        self.seen = self.context.wrap_reducer(_total, name="seen", for_validation=False)

    def die(self, place: str, batch: int) -> None:
        own = f"rank{self.context.distributed.rank}"
        if {(place, str(batch)), (own, str(batch))} & self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if (place, str(batch)) in self.stop_at and own == "rank0":
            os.kill(os.getppid(), signal.SIGTERM)  # to the launcher, which hands it on

    def build_training_data_loader(self) -> DataLoader:
        hparams = self.context.get_hparams()
        workers = hparams.get("num_workers", 0)
        return self.training_loader(Noisy(40, self.noise), num_workers=workers)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(Noisy(10, 0.0))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"remembering": self.remembering}

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.die("before", batch_idx + 1)
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        if os.environ.get("NAN_AT") == f"{self.context.distributed.rank}:{batch_idx + 1}":
            metrics = {"loss": torch.tensor(float("nan"))}
        self.seen.update(float(torch.rand(())))  # a custom reducer, fed with the generator's own numbers
        self.die("after", batch_idx + 1)
        return metrics

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        self.die("validating", getattr(self.context, "_current_batch_idx", -1) + 1)
        return super().evaluate_batch(dataloader_iter, batch_idx)

    def save(self, context: Any, path: Path) -> None:
        batch = context._current_batch_idx + 1
        if ("torn", str(batch)) in self.kill_at and context.distributed.rank == 0:
            (path / "half-written").write_bytes(b"x" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        super().save(context, path)
        self.die("saved", batch)


def _total(values: list[float]) -> float:
    return sum(values)


def _block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.ReLU(), torch.nn.Dropout(0.2))


class Victim(_Mortal, DataParallelTrial):
    """Data parallel."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(_block(), _block(), torch.nn.Linear(FEATURES, OUTPUTS))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs.to(next(model.parameters()).dtype)).float(), targets)


class PlainVictim(Victim):
    """Draws no random numbers: it trains the same on any number of ranks."""

    noise = 0.0

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, OUTPUTS))


class TorchVictim(Victim):
    """Its loaders are torch's own."""

    def build_training_data_loader(self) -> Any:
        workers = self.context.get_hparams().get("num_workers", 0)
        return torch.utils.data.DataLoader(
            Noisy(40, 0.1),
            batch_size=self.micro_batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
        )

    def build_validation_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(Noisy(10, 0.0), batch_size=self.micro_batch_size)


class Stream(torch.utils.data.IterableDataset):
    """The samples of ``Noisy``, shuffled by Python's generator; a global batch does not divide them."""

    def __init__(self, count: int, noise: float) -> None:
        self.samples = Noisy(count, noise)

    def shuffled(self) -> list[int]:
        return random.sample(range(len(self.samples)), len(self.samples))

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in self.shuffled())


class PlacedStream(Stream):
    """Knows its place and its order."""

    order: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        self.order = self.order or (*self.shuffled(),)
        while self.order:
            self.order, index = self.order[:-1], self.order[-1]
            yield self.samples[index]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order = state_dict["order"]


def _noisier(samples: list[Any]) -> Any:
    """An augmentation in ``collate_fn``."""
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs + 0.1 * torch.randn_like(inputs), targets


class _Streaming(_Mortal):
    """Trains and validates on streams of unknown length, of which the one for training knows its place."""

    def build_training_data_loader(self) -> Any:
        workers = self.context.get_hparams().get("num_workers", 0)
        return self.training_loader(PlacedStream(43, 0.1), num_workers=workers, collate_fn=_noisier)

    def build_validation_data_loader(self) -> Any:
        return self.validation_loader(Stream(11, 0.0))


class StreamVictim(_Streaming, Victim):
    """Replicas on one stream."""


class PipelineVictim(_Mortal, PipelineTrial):
    """Two stages."""

    partition_method = "uniform"

    def build_layers(self) -> list[Any]:
        return [_block(), _block(), _block(), torch.nn.Linear(FEATURES, OUTPUTS)]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, targets)


class PipelineStreamVictim(_Streaming, PipelineVictim):
    """Two stages that both read a stream."""
