"""PipelineTrial: layers over pipeline stages, trained by the schedule that ``pipe_schedule`` names."""

from __future__ import annotations

import abc
import contextlib
import io
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import is_model_parallel_parameter

from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.orders import ZB_H1, Pipeline
from determined_ds.pipe.partition import MEASURED, UNIFORM
from determined_ds.trial import returned
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.measured_partition import measured_partition
from determined_ds.trial.ordered_module import made_module, process_topology
from determined_ds.trial.tensor_parallel import KEY, SIZE, degree_in


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
    called_with: ClassVar[dict[str, tuple[str, ...]]] = {
        **ReconciledTrial.called_with,
        "build_layers": (),
        "loss": ("outputs", "targets"),
        "load_weights": ("module",),
    }

    @abc.abstractmethod
    def build_layers(self) -> list[Any]:
        """Build the layers, in order.

        Returns:
            Modules, functions, ``LayerSpec`` or ``TiedLayerSpec``; at least one for each pipeline stage.
        """

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
        return self.resolved.strategy.partition_method or self.partition_method

    def build_model(self) -> PipelineModule:
        """Divide the layers over the pipeline stages, and load their weights.

        Returns:
            This rank's part of the model.
        """
        pipe = self.resolved.strategy.pipeline
        self._check_schedule(pipe)
        if (degree := degree_in(self.resolved.ds_config)) > 1:
            message = f"{type(self).__name__} is a PipelineTrial, and AutoTP cuts whole models alone"
            fix = "extend DataParallelTrial; or remove tensor_parallel, and build layers that cut themselves"
            raise ConfigError(
                Problem(key=f"{KEY}.autotp_size", value=degree, message=message, fix=fix, code=KEY)
            )
        layers = returned.layers(self, self.build_layers(), pipe.ranks, pipe.chunks)
        method, bounds = returned.partition_method(self, self.chosen_partition, layers), None
        if method == MEASURED and pipe.ranks > 1:
            bounds = measured_partition(self, layers, pipe, self._checked_loss).bounds
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers, whatever its log level
            module = made_module(
                pipe,
                topology=process_topology(self.resolved.topology),
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
        """One optimizer step: all micro-batches of a replica, through all its pipeline stages.

        Args:
            dataloader_iter: Yields micro-batches; None on stages that read none.
            epoch_idx: Epochs completed, from 0.
            batch_idx: Optimizer steps completed, from 0.

        Returns:
            The mean loss, as ``loss``.
        """
        return {"loss": self.engine.train_batch(data_iter=self._on_device(dataloader_iter))}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """The mean loss over the next micro-batches, as many as the engine is set to take.

        Args:
            dataloader_iter: Yields micro-batches; None on stages that read none.
            batch_idx: Batches validated before it.

        Returns:
            The mean loss, as ``validation_loss``.
        """
        return {"validation_loss": self.engine.eval_batch(self._on_device(dataloader_iter))}

    def _check_schedule(self, pipe: Pipeline) -> None:
        """Refuse what a schedule cannot do and only the trial and this process show; the rest is refused by rules."""
        if pipe.schedule != ZB_H1 or pipe.ranks == 1:
            return
        key, message = "", ""
        if self.activation_checkpoint_interval:
            key = f"{type(self).__name__}.activation_checkpoint_interval"
            message = (
                "zb-h1 cannot train with activation checkpointing: each layer would be computed anew twice"
            )
        elif torch.__version__ < "2.7":  # whose backward() does not begin at a node of the graph
            key, message = "torch", "zb-h1 needs torch 2.7 or later"
        if key:
            fix = "take another hyperparameters.pipe_schedule"
            raise ConfigError(Problem(key=key, message=message, fix=fix, code="zb-h1"))

    def _check_cut(self, module: PipelineModule) -> None:
        """Refuse ranks that are to share layers, and hold all of them each; a collective."""
        degree = self.resolved.topology.model_parallel_size
        distributed = self.context.distributed
        if degree == 1 or distributed is None:
            return
        if any(distributed.allgather(any(map(is_model_parallel_parameter, module.parameters())))):
            return
        kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in module.forward_funcs)) or "no layers"
        name = type(self).__name__
        message = f"no parameter of {name}'s layers ({kinds}) is cut among ranks, so {degree} would compute the same"
        fix = (
            "set model_parallel_size to 1; or build layers that hold a part each, whose parameters have the attribute "
            "model_parallel = True"
        )
        raise ConfigError(Problem(key=SIZE, value=degree, message=message, fix=fix, code=KEY))

    def _checked_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return returned.pipeline_loss(self, self.loss(outputs, targets))

    def _on_device(self, batches: Iterator[Any] | None) -> Iterator[Any] | None:
        return None if batches is None else map(self.context.to_device, batches)
