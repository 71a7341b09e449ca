"""The model, the data and the two other loops of the benchmark. Imported in ranks only."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import torch
from determined import core
from determined.pytorch import DataLoader
from determined.pytorch import deepspeed as det_ds

from determined_ds import DataParallelTrial, DeepSpeedTrialContext
from determined_ds.runtime.data.samples import training_data

NUM_SAMPLES = 8192


class Toy(DataParallelTrial):
    """Three layers, and the times at which its batches began."""

    def prepare(self) -> None:
        self.width = int(self.context.get_hparams()["width"])
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(NUM_SAMPLES, self.width, generator=generator)
        self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
        self.starts: list[float] = []

    def build_model(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(self.width, self.width), torch.nn.ReLU()] * 2
        return torch.nn.Sequential(*layers, torch.nn.Linear(self.width, 1))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.starts.append(time.perf_counter())
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(torch.utils.data.Subset(self.data, range(2 * self.micro_batch_size)))

    def save(self, context: Any, path: Any) -> None:
        """Nothing: a checkpoint is measured elsewhere, and the disk would go on with it through the next turn."""

    def seconds_a_batch(self) -> float:
        """From the first batch's start to the last one's, over the batches between; reports included."""
        starts = self.starts[:: self.resolved.batch.accumulation]
        return (starts[-1] - starts[0]) / (len(starts) - 1)


class Saved(Toy):
    """The same, and its checkpoints are whole."""

    def save(self, context: Any, path: Any) -> None:
        DataParallelTrial.save(self, context, path)


def plain_batches(trial: Toy, num_batches: int) -> None:
    """The loop of DeepSpeed's own documentation."""
    engine, batch = trial.engine, trial.resolved.batch
    replica = torch.distributed.get_rank()
    data = training_data(
        trial.build_training_data_loader(), batch=batch, replica=replica, seed=0, start_batch=0
    )
    engine.train()
    for micro_batch in itertools.islice(data.batches, num_batches * batch.accumulation):
        trial.starts.append(time.perf_counter())
        loss = trial.loss(engine, micro_batch)
        engine.backward(loss)
        engine.step()


class _OnCPU(det_ds.DeepSpeedTrialContext):
    def _init_device(self) -> None:
        self.device = torch.device("cpu")


def determined_context(
    ours: DeepSpeedTrialContext,
    hparams: dict[str, Any],
    checkpoint_storage: str | None = None,
    **ports: int,
) -> det_ds.DeepSpeedTrialContext:
    """Determined's own context, on CPU; its ranks talk over the sockets of its own DistributedContext.

    Args:
        ours: A context of the same ranks.
        hparams: As the experiment has them.
        checkpoint_storage: Folder; one beside the TensorBoard files if None.
        ports: ``pub_port`` and ``pull_port``, the same for every run on a machine unless they are stated.
    """
    logging.getLogger("determined").setLevel(logging.ERROR)
    distributed = core.DistributedContext(
        rank=ours.distributed.rank,
        size=ours.distributed.size,
        local_rank=ours.distributed.local_rank,
        local_size=ours.distributed.local_size,
        cross_rank=0,
        cross_size=1,
        **ports,
    )
    path = ours.get_tensorboard_path()
    context = core._dummy_init(
        distributed=distributed,
        checkpoint_storage=checkpoint_storage or str(path.parent / "theirs"),
        tensorboard_path=path,
    )
    context.start()
    return _OnCPU(
        core_context=context,
        trial_seed=0,
        hparams=hparams,
        slots_per_trial=ours.distributed.size,
        num_gpus=0,
        exp_conf={},
        steps_completed=0,
    )


def determined_trainer(trial: Toy, context: det_ds.DeepSpeedTrialContext) -> det_ds.Trainer:
    """Determined's own trainer."""
    return det_ds.Trainer(trial, context)
