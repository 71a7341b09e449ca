"""PipelineTrial: a PipelineModule trained by DeepSpeed's 1F1B schedule."""

from __future__ import annotations

import abc
import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from determined import pytorch

from determined_ds.trial.base import ReconciledTrial


class PipelineTrial(ReconciledTrial):
    """Write the layers, the loss and the data; stages, schedule and evaluation are done.

    A data loader yields ``(inputs, targets)``. Between stages travel tensors of floats only.
    """

    partition_method = "parameters"
    activation_checkpoint_interval = 0

    @abc.abstractmethod
    def build_layers(self) -> list[Any]:
        """The layers in order: modules, functions, ``LayerSpec`` or ``TiedLayerSpec``."""

    @abc.abstractmethod
    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The mean loss of a micro-batch, on the last stage.

        Args:
            outputs: What the last layer returned.
            targets: The second element of the data loader's pairs.
        """

    def load_weights(self, module: PipelineModule) -> None:
        """Fill this stage's layers with the weights to start from. By default they stay as built."""

    def build_model(self) -> PipelineModule:
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers, whatever its log level
            module = PipelineModule(
                layers=self.build_layers(),
                num_stages=self.resolved.topology.pipe_parallel_size,
                loss_fn=self.loss,
                partition_method=self.partition_method,
                activation_checkpoint_interval=self.activation_checkpoint_interval,
            )
        self.load_weights(module)
        return module

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        """One optimizer step: all the micro-batches of a replica, through all its stages."""
        return {"loss": self.engine.train_batch(data_iter=self._on_device(dataloader_iter))}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """The mean loss over the samples of the next micro-batches, the tail of the data included."""
        full = self.context.get_num_micro_batches_per_slot()
        # Our loop's iterator says how many micro-batches are left and what each weighs; under Determined's
        # own loop there is always a full batch of them, all alike.
        count = min(full, getattr(dataloader_iter, "remaining", full))
        sizes: list[int] = []
        batches = self._on_device(dataloader_iter, sizes)
        with _monitor_silenced(self.engine):
            # Each micro-batch's own loss, so that a smaller last one can be weighed by its samples.
            losses = self.engine.eval_batch(
                batches, num_micro_batches=count, reduce_output=None, bcast_loss=False
            )
        weights = getattr(dataloader_iter, "weights", sizes)
        return {"validation_loss": self._mean_on_all_stages(losses, weights)}

    def _on_device(self, batches: Iterator[Any] | None, sizes: list[int] | None = None) -> Iterator[Any] | None:
        return None if batches is None else _move(batches, self.context, sizes)

    def _mean_on_all_stages(self, losses: list[torch.Tensor] | None, weights: list[int]) -> torch.Tensor:
        """The mean of the last stage's losses by weight; zero where every weight is."""
        mean = torch.zeros((), device=self.context.device)
        if self.engine.is_last_stage() and any(weights):
            assert losses is not None
            parts = [loss.float() * weight for loss, weight in zip(losses, weights, strict=True) if weight]
            mean = torch.stack(parts).sum().to(self.context.device) / sum(weights)
        grid = self.engine.grid
        if grid.pipe_parallel_size > 1:
            source = self.engine._loss_stage_global_rank()
            torch.distributed.broadcast(mean, src=source, group=grid.get_pipe_parallel_group())
        return mean


def _move(batches: Iterator[Any], context: Any, sizes: list[int] | None) -> Iterator[Any]:
    for batch in batches:
        if sizes is not None:
            sizes.append(pytorch.data_length(batch))
        yield context.to_device(batch)


@contextlib.contextmanager
def _monitor_silenced(engine: Any) -> Iterator[None]:
    """With a monitor on, ``eval_batch`` broadcasts its output, which must then be one tensor, not a list.

    Source: ``PipelineEngine.eval_batch`` in deepspeed 0.19.8's ``runtime/pipe/engine.py``.
    """
    monitor = getattr(engine, "monitor", None)
    was = getattr(monitor, "enabled", False)
    try:
        if was:
            monitor.enabled = False  # type: ignore[union-attr]
        yield
    finally:
        if was:
            monitor.enabled = True  # type: ignore[union-attr]
