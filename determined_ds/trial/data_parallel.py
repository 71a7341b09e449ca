"""DataParallelTrial: replicas of one model, under ZeRO 0 to 3."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch

from determined_ds.trial import returned
from determined_ds.trial.base import ReconciledTrial


class DataParallelTrial(ReconciledTrial):
    """Write the model, the loss and the data; the library does the rest.

    Example::

        class MyTrial(DataParallelTrial):
            def build_model(self):
                return torch.nn.Linear(10, 1)

            def loss(self, model, batch):
                inputs, targets = batch
                return torch.nn.functional.mse_loss(model(inputs), targets)

            def build_training_data_loader(self):
                return self.training_loader(my_training_set)

            def build_validation_data_loader(self):
                return self.validation_loader(my_validation_set)
    """

    @abc.abstractmethod
    def loss(self, model: Any, batch: Any) -> torch.Tensor | dict[str, Any]:
        """The mean loss of a micro-batch.

        Args:
            model: The engine; call it as the model.
            batch: One micro-batch, on the device.

        Returns:
            A scalar tensor, or metrics by name whose ``loss`` is the scalar to descend.
        """

    def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
        """Validation metrics of a batch; by default those of :meth:`loss`, as ``validation_<name>``.

        Args:
            model: The engine, in evaluation mode, without gradients.
            batch: One micro-batch, on the device; the last one may be smaller.

        Returns:
            Metrics by name, each a mean over the samples of the batch.
        """
        metrics = returned.losses(self, self.loss(model, batch), trains=False)
        return {f"validation_{name}": value for name, value in metrics.items()}

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        """Train one micro-batch, and return the metrics of :meth:`loss`; see Determined's method of this name.

        The engine steps at the end of an accumulation.
        """
        assert dataloader_iter is not None
        batch = self.split_sequence(self.context.to_device(next(dataloader_iter)))
        metrics = returned.losses(self, self.loss(self.engine, batch))
        self.engine.backward(metrics["loss"])
        self.engine.step()
        return {**metrics, "loss": metrics["loss"].detach()}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """The metrics of the next micro-batch by :meth:`evaluate`; see Determined's method of this name."""
        assert dataloader_iter is not None
        batch = self.split_sequence(self.context.to_device(next(dataloader_iter)))
        return self.evaluate(self.engine, batch)
