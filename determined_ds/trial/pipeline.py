"""PipelineTrial: layers over pipeline stages, trained by the schedule that ``pipe_schedule`` names."""

from __future__ import annotations

import abc
import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.utils import is_model_parallel_parameter

from determined_ds.config.strategy import autotp_degree
from determined_ds.pipe.orders import ZB_H1, Pipeline
from determined_ds.pipe.partition import MEASURED, METHODS, UNIFORM, method_problem
from determined_ds.trial import returned
from determined_ds.trial.author import refused
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.divided import LAYERS, LAYERS_SIZE
from determined_ds.trial.measured_partition import measured_partition
from determined_ds.trial.pipeline_module import ScheduledModule


class PipelineTrial(ReconciledTrial):
    """Write the layers, the loss and the data; the library does stages, schedule and evaluation.

    A data loader yields ``(inputs, targets)``. Tensors pass between stages, alone or in a tuple; of 1F1B with three
    stages or more, floats alone.

    Attributes:
        partition_method: How layers are shared out: ``parameters``, ``uniform``, ``measured`` (by the time that each
            takes) or ``type:REGEX`` of class names. The hyperparameter of that name overrides it.
        activation_checkpoint_interval: Layers that are recomputed together in the backward pass; 0: none.
        checkpointable_layers: Names of the classes to recompute; None: all that have parameters, which fails where
            the first layer takes integers.
    """

    partition_method = "parameters"
    activation_checkpoint_interval = 0
    checkpointable_layers: list[str] | None = None
    is_whole = False

    @abc.abstractmethod
    def build_layers(self) -> list[Any]:
        """Build the layers, in order: modules, functions, ``LayerSpec`` or ``TiedLayerSpec``, one a stage or more."""

    @abc.abstractmethod
    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The mean loss of a micro-batch, on the last stage.

        Args:
            outputs: What the last layer returned.
            targets: The second element of the data loader's pairs.

        Returns:
            A scalar tensor that requires a gradient.
        """

    def load_weights(self, module: PipelineModule) -> None:
        """Fill the layers of this pipeline stage with their initial weights. By default they stay as built.

        Each layer is built under a seed of the trial's and its number, so they are the same under every schedule.

        Args:
            module: This rank's part of the model.
        """

    @property
    def chosen_partition(self) -> str:
        """How layers are shared out: the hyperparameter ``partition_method``, or else the attribute."""
        if (stated := self.resolved.strategy.partition_method) is not None:
            return stated
        if message := method_problem(self.partition_method):
            key, fix = (
                f"{type(self).__name__}.partition_method",
                f"use {', '.join(METHODS)} or e.g. type:Block",
            )
            raise refused(key, message, fix, "partition-method", value=self.partition_method)
        return self.partition_method

    def build_model(self) -> PipelineModule:
        """Divide the layers over the pipeline stages, and load the weights of this rank's part, which is returned."""
        pipe, layout = self.resolved.strategy.pipeline, self.resolved.topology
        self._check_schedule(pipe)
        layers = returned.layers(self, self.build_layers(), pipe.ranks, pipe.chunks)
        method, bounds = self.chosen_partition, None
        if method == MEASURED and pipe.ranks > 1:
            bounds = measured_partition(self, layers, pipe, self._checked_loss).bounds
        names = ("pipe", "data", "model") if layout.model_parallel_size > 1 else ("pipe", "data")
        axes = {name: size for name, size in layout.axes.items() if name in names}
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers, whatever its log level
            module = ScheduledModule(
                pipe,
                topology=ProcessTopology(axes=list(axes), dims=list(axes.values())),
                layers=layers,
                loss_fn=self._checked_loss,
                bounds=bounds,
                base_seed=self.context.get_trial_seed(),
                partition_method=UNIFORM if method == MEASURED else method,
                activation_checkpoint_interval=self.activation_checkpoint_interval,
                checkpointable_layers=self.checkpointable_layers,
            )
        self._check_cut(module)
        self.load_weights(module)
        return module

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        """One optimizer step: all micro-batches of a replica through all its stages, and their mean ``loss``.

        See Determined's method of this name; ``dataloader_iter`` is None on stages that read nothing.
        """
        return {"loss": self.engine.train_batch(data_iter=self._on_device(dataloader_iter))}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """The mean ``validation_loss`` over the next micro-batches, as many as the engine is set to take."""
        return {"validation_loss": self.engine.eval_batch(self._on_device(dataloader_iter))}

    def _check_schedule(self, pipe: Pipeline) -> None:
        """Refuse what only the trial shows; the rest is refused by rules."""
        name, interval = type(self).__name__, self.activation_checkpoint_interval
        if pipe.schedule == ZB_H1 and pipe.ranks > 1 and interval:
            message = "zb-h1 trains without activation checkpointing: each layer would be computed anew twice"
            fix = "take another hyperparameters.pipe_schedule"
            raise refused(f"{name}.activation_checkpoint_interval", message, fix, ZB_H1, value=interval)
        if (degree := autotp_degree(self.resolved.ds_config)) > 1:
            message = f"{name} is a PipelineTrial, and AutoTP cuts whole models alone"
            fix = "extend DataParallelTrial; or remove tensor_parallel, and build layers that cut themselves"
            raise refused(f"{LAYERS}.autotp_size", message, fix, LAYERS, value=degree)

    def _check_cut(self, module: ScheduledModule) -> None:
        """Refuse ranks that are to share layers, and hold all of them each; a collective."""
        degree, ranks = self.resolved.topology.model_parallel_size, self.context.distributed
        if degree == 1 or ranks is None:
            return
        if not any(ranks.allgather(any(map(is_model_parallel_parameter, module.parameters())))):
            message = f"no parameter of {type(self).__name__}'s layers is cut, so {degree} ranks would compute the same"
            fix = "set it to 1; or build layers that hold a part each, with model_parallel = True on their parameters"
            raise refused(LAYERS_SIZE, message, fix, LAYERS, value=degree)

    def _checked_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return returned.losses(self, self.loss(outputs, targets), trains=torch.is_grad_enabled())["loss"]  # type: ignore[no-any-return]

    def _on_device(self, batches: Iterator[Any] | None) -> Iterator[Any] | None:
        return None if batches is None else map(self.context.to_device, batches)
