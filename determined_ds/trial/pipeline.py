"""PipelineTrial: layers over pipeline stages, trained by the schedule that ``pipe_schedule`` names."""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import io
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch.utils._pytree import tree_map_only

from determined_ds.config.strategy import autotp_degree
from determined_ds.pipe import partition
from determined_ds.pipe.orders import ZB_H1
from determined_ds.pipe.partition import LayerTime, Partition
from determined_ds.trial import returned
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.divided import LAYERS, LAYERS_SIZE
from determined_ds.trial.pipeline_engine import ScheduledModule, leaf
from determined_ds.trial.returned import refused
from determined_ds.trial.stream_loader import micro_batch_of

LEAST, MOST = 3, 15  # repetitions of a layer
ENOUGH_S = 0.2  # of a layer's repetitions
ALIKE = 0.25  # layers of a kind take equally long, where their times differ by no more
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        stated, method = self.resolved.strategy.partition_method, self.partition_method
        if stated is None and (message := partition.method_problem(method)):
            key, fix = f"{type(self).__name__}.partition_method", "use parameters or e.g. type:Block"
            raise refused(key, message, fix, "partition-method", value=method)
        return stated or method

    def build_model(self) -> PipelineModule:
        """Divide the layers over the pipeline stages, and load the weights of this rank's part, which is returned."""
        name, interval = type(self).__name__, self.activation_checkpoint_interval
        pipe, layout = self.resolved.strategy.pipeline, self.resolved.topology
        # What only the trial shows; the rest is refused by rules.
        if pipe.schedule == ZB_H1 and pipe.ranks > 1 and interval:
            message = "zb-h1 trains without activation checkpointing: each layer would be computed anew twice"
            fix = "take another hyperparameters.pipe_schedule"
            raise refused(f"{name}.activation_checkpoint_interval", message, fix, ZB_H1, value=interval)
        if (degree := autotp_degree(self.resolved.ds_config)) > 1:
            message = f"{name} is a PipelineTrial, and AutoTP cuts whole models alone"
            fix = "extend DataParallelTrial; or remove tensor_parallel, and build layers that cut themselves"
            raise refused(f"{LAYERS}.autotp_size", message, fix, LAYERS, value=degree)
        layers = returned.layers(self, self.build_layers(), pipe.ranks, pipe.chunks)
        method, bounds = self.chosen_partition, None
        if method == partition.MEASURED:
            method, bounds = partition.UNIFORM, _measured_bounds(self, layers) if pipe.ranks > 1 else None
        degree = layout.model_parallel_size
        names = ("pipe", "data", "model") if degree > 1 else ("pipe", "data")
        axes = {axis: size for axis, size in layout.axes.items() if axis in names}
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its layers, whatever its log level
            module = ScheduledModule(
                pipe,
                topology=ProcessTopology(axes=list(axes), dims=list(axes.values())),
                layers=layers,
                loss_fn=self._checked_loss,
                bounds=bounds,
                base_seed=self.context.get_trial_seed(),
                partition_method=method,
                activation_checkpoint_interval=interval,
                checkpointable_layers=self.checkpointable_layers,
            )
        is_cut = any(map(is_model_parallel_parameter, module.parameters()))
        ranks = self.context.distributed
        if degree > 1 and ranks is not None and not any(ranks.allgather(is_cut)):
            message = f"no parameter of {name}'s layers is cut, so {degree} ranks would compute the same"
            fix = "set it to 1; or build layers that hold a part each, with model_parallel = True on their weights"
            raise refused(LAYERS_SIZE, message, fix, LAYERS, value=degree)
        self.load_weights(module)
        return module

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """One optimizer step: all micro-batches of a replica through all its stages, and their mean ``loss``.

        See Determined's method of this name; ``dataloader_iter`` is None on stages that read nothing.
        """
        return {"loss": self.engine.train_batch(data_iter=self._on_device(dataloader_iter))}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        """The mean ``validation_loss`` over the next micro-batches, as many as the engine is set to take."""
        return {"validation_loss": self.engine.eval_batch(self._on_device(dataloader_iter))}

    def _checked_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return returned.losses(self, self.loss(outputs, targets), trains=torch.is_grad_enabled())["loss"]  # type: ignore[no-any-return]

    def _on_device(self, batches: Any) -> Any:
        return None if batches is None else map(self.context.to_device, batches)


# ------------------------------------------------------------------------------------------- partition_method: measured


def _measured_bounds(trial: PipelineTrial, specs: Sequence[Any]) -> partition.Bounds:
    """Where the layers that a trial's ``build_layers`` returned are cut, by the time that each takes; a collective.

    They are cut as in the checkpoint that training continues from, if it has a partition of these layers; else rank 0
    measures them for all. The cut with the shortest step is kept in the run directory and in each checkpoint. Measuring
    leaves no trace: generators of random numbers are as they were, and modules that a trial built itself are copied.
    """
    context: Any = trial.context
    pipe, is_chief = trial.resolved.strategy.pipeline, context.distributed.rank == 0
    if not hasattr(context, "keep_partition") or trial.resolved.topology.model_parallel_size > 1:
        key, fix = f"{type(trial).__name__}.partition_method", "use parameters, uniform or type:REGEX"
        message = "layers are measured under determined_ds.Trainer alone, and where no ranks share them"
        raise refused(key, message, fix, "partition-measured", value=partition.MEASURED)
    names = [getattr(getattr(spec, "typename", spec), "__name__", type(spec).__name__) for spec in specs]
    found = partition.read_partition(context.stored_partition() or "", names, pipe)
    if found is None:
        layers = context.distributed.broadcast(_measured_layers(trial, specs, names) if is_chief else None)
        found = Partition(pipe=pipe, layers=layers, bounds=partition.fastest(layers, pipe))
    context.keep_partition(found.text())
    if is_chief:
        sizes = "+".join(str(b - a) for a, b in itertools.pairwise(found.bounds))
        print(f"partition   {sizes} layers by their measured times", flush=True)
    return found.bounds


def _measured_layers(
    trial: PipelineTrial, specs: Sequence[Any], names: Sequence[str]
) -> tuple[LayerTime, ...]:
    """Measure each layer of a trial on this rank's device, one layer at a time; the loss belongs to the last one."""
    device = torch.device(trial.context.device)
    dtype = DTYPES[trial.resolved.strategy.precision]
    interval = (trial.resolved.ds_config.get("pipeline") or {}).get("activation_checkpoint_interval")
    recomputes, recomputed = interval or trial.activation_checkpoint_interval, trial.checkpointable_layers

    def since(start: float) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    def timed(call: Callable[[Any], Any], inputs: Any) -> tuple[float, float, Any]:
        """Seconds of a forward and of a backward pass, medians of several, and what the last pass returned."""
        began, seconds = time.perf_counter(), list[tuple[float, float]]()
        while len(seconds) <= LEAST or (len(seconds) <= MOST and time.perf_counter() - began < ENOUGH_S):
            given = tree_map_only(torch.Tensor, leaf, inputs)
            start = time.perf_counter()
            outputs = call(given)
            forward_s = since(start)
            many = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            trained = [each for each in many if isinstance(each, torch.Tensor) and each.requires_grad]
            gradients = [torch.ones_like(each) for each in trained]
            start = time.perf_counter()
            if trained:
                torch.autograd.backward(trained, gradients)
            seconds.append((forward_s, since(start)))
        forward_s, backward_s = (statistics.median(each) for each in zip(*seconds[1:], strict=True))
        return forward_s, backward_s, tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    with contextlib.ExitStack() as kept:
        kept.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        kept.callback(random.setstate, random.getstate())
        kept.callback(np.random.set_state, np.random.get_state())

        batch = micro_batch_of(trial.build_training_data_loader(), trial.micro_batch_size)
        inputs, targets = tree_map_only(torch.Tensor, lambda each: each.to(device), batch)
        inputs = tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
        found = []
        for spec, name in zip(specs, names, strict=True):
            module = copy.deepcopy(spec) if isinstance(spec, torch.nn.Module) else spec
            module = spec.build() if isinstance(spec, LayerSpec) else module
            is_module = isinstance(module, torch.nn.Module)
            held = list(module.to(device, dtype).parameters()) if is_module else []
            forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
            call = functools.partial(forward_fn, module) if forward_fn is not None else module
            forward_s, backward_s, inputs = timed(call, inputs)
            # Whether the backward pass computes it again: PipelineModule._is_checkpointable in deepspeed 0.19.8.
            if recomputes and (bool(held) if recomputed is None else name in recomputed):
                backward_s += forward_s
            size = sum(each.numel() for each in held if each.requires_grad)
            found.append(LayerTime(name=name, parameters=size, forward_s=forward_s, backward_s=backward_s))
        loss_s, loss_backward_s, _ = timed(lambda outputs: trial._checked_loss(outputs, targets), inputs)

    layers = []
    for layer in found:  # the median of its class and size, where its time is near that: the rest is noise
        alike = [each for each in found if (each.name, each.parameters) == (layer.name, layer.parameters)]
        middle = sorted(alike, key=lambda each: each.seconds)[len(alike) // 2]
        is_near = abs(layer.seconds - middle.seconds) <= ALIKE * middle.seconds
        layers.append(middle if is_near else layer)
    forward_s, backward_s = layers[-1].forward_s + loss_s, layers[-1].backward_s + loss_backward_s
    layers[-1] = replace(layers[-1], forward_s=forward_s, backward_s=backward_s)
    return tuple(layers)
