"""Trials that meet the faults which ``FAULTS`` names, as JSON: out of memory, a poisoned sample, a rank that is killed.

``oom``: the batch at which rank 1 runs out of memory, with micro-batches of more than ``fits`` samples. ``hog``: that
at which it takes much of the machine's memory. ``poison``: the index of a sample whose target is far off. ``kill``: a
batch before which rank 1 is killed, once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from determined_ds import DataLoader
from tests.interrupted.trials import Noisy, PipelineVictim, PlainVictim, Stream, StreamVictim, Victim

FAULTS = json.loads(os.environ.get("FAULTS", "{}"))
SAMPLES = 320  # forty batches of eight
FAR_OFF = 1e5


def meet_faults(batch: int, rank: int, micro_batch_size: int) -> None:
    """Before a batch, counted from 1."""
    time.sleep(FAULTS.get("slow", 0.0))
    if rank == 1 and batch == FAULTS.get("hog"):
        torch.ones(2**31)  # 8 GiB of the machine's memory
    if rank == 1 and batch == FAULTS.get("oom") and micro_batch_size > FAULTS.get("fits", 1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    mark = Path(FAULTS.get("marks", ""), f"killed{batch}")
    if rank == 1 and batch == FAULTS.get("kill") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Poisoned(Noisy):
    """One of its targets is far off."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs, targets + FAR_OFF * (index == FAULTS.get("poison"))


class _Faulty:
    noise: float
    context: Any
    resolved: Any
    training_loader: Any

    def build_training_data_loader(self) -> DataLoader:
        workers = self.context.get_hparams().get("num_workers", 0)
        return self.training_loader(Poisoned(SAMPLES, self.noise), num_workers=workers)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        size = self.resolved.batch.micro_batch_size
        meet_faults(batch_idx + 1, self.context.distributed.rank, size)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)  # type: ignore[misc, no-any-return]


class Faulty(_Faulty, Victim):
    """Data parallel, with dropout and an augmentation."""


class PlainFaulty(_Faulty, PlainVictim):
    """It draws no random numbers, and so trains the same in other micro-batches."""


class FaultyPipeline(_Faulty, PipelineVictim):
    """Two stages."""


class PlainFaultyPipeline(FaultyPipeline):
    """The same without random numbers."""

    noise = 0.0

    def build_layers(self) -> list[Any]:
        return [*(torch.nn.Linear(12, 12) for _ in range(3)), torch.nn.Linear(12, 2)]


class Stateless(StreamVictim):
    """Its stream does not know its place."""

    def build_training_data_loader(self) -> Any:
        return self.training_loader(Stream(43, 0.1))


class OwnLoad(Faulty):
    """Reads its checkpoints itself."""

    def load(self, context: Any, path: Path) -> None:
        super().load(context, path)
