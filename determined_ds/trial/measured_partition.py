"""``partition_method: measured``: the layers of a pipeline, shared out by the time that each takes.

The way of a partition::

    the checkpoint that training continues from, if it has one for these layers
    else rank 0 measures its layers, one after the other, and all ranks get the times
    -> the cut with the shortest step -> partition.json in the run directory, and in each checkpoint

Measuring leaves no trace: the generators of random numbers are as they were, and modules that a trial built itself are
copied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch.utils._pytree import tree_map_only

from determined_ds.pipe.orders import Pipeline
from determined_ds.pipe.partition import MEASURED, LayerTime, Partition, fastest, read_partition
from determined_ds.trial.author import refused
from determined_ds.trial.stream_loader import micro_batches_of

LEAST, MOST = 3, 15  # repetitions of a layer
ENOUGH_S = 0.2  # of a layer's repetitions
ALIKE = 0.25  # layers of a kind take equally long, where their times differ by no more
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measured_partition(
    trial: Any, specs: Sequence[Any], pipe: Pipeline, loss: Callable[[Any, Any], Any]
) -> Partition:
    """The partition by their times of the layers that a trial's ``build_layers`` returned; a collective."""
    context = trial.context
    if not hasattr(context, "keep_partition") or trial.resolved.topology.model_parallel_size > 1:
        key, fix = f"{type(trial).__name__}.partition_method", "use parameters, uniform or type:REGEX"
        message = "layers are measured under determined_ds.Trainer alone, and where no ranks share them"
        raise refused(key, message, fix, "partition-measured", value=MEASURED)
    names = [getattr(getattr(spec, "typename", spec), "__name__", type(spec).__name__) for spec in specs]
    found, is_chief = read_partition(context.stored_partition() or ""), context.distributed.rank == 0
    if found is None or not found.is_of(names, pipe):
        layers = measured_layers(trial, specs, names, loss) if is_chief else None
        layers = context.distributed.broadcast(layers)
        found = Partition(pipe=pipe, layers=layers, bounds=fastest(layers, pipe))
    context.keep_partition(found.text())
    if is_chief:
        print(f"partition   {found.in_words()}", flush=True)
    return found


def measured_layers(
    trial: Any, specs: Sequence[Any], names: Sequence[str], loss: Callable[[Any, Any], torch.Tensor]
) -> tuple[LayerTime, ...]:
    """Measure each layer of a trial on this rank's device, one layer at a time; the others take no part.

    The loss belongs to the last layer; making a micro-batch to the first and the last one, whose ranks make theirs.
    """
    device = torch.device(trial.context.device)
    dtype = DTYPES[trial.resolved.strategy.precision]
    interval = (trial.resolved.ds_config.get("pipeline") or {}).get("activation_checkpoint_interval")
    recomputes, recomputed = interval or trial.activation_checkpoint_interval, trial.checkpointable_layers
    found = []
    with _generators_kept(device):
        inputs, targets, making_s = _micro_batch(trial, device, dtype)
        for spec, name in zip(specs, names, strict=True):
            module, held = spec, []
            if isinstance(spec, (LayerSpec, torch.nn.Module)):
                module = spec.build() if isinstance(spec, LayerSpec) else copy.deepcopy(spec)
            if isinstance(module, torch.nn.Module):
                held = list(module.to(device, dtype).parameters())
            forward_fn = getattr(spec, "forward_fn", None) if isinstance(spec, TiedLayerSpec) else None
            call = functools.partial(forward_fn, module) if forward_fn is not None else module
            forward_s, backward_s, inputs = _timed(call, inputs, device)
            # Whether the backward pass computes it again: PipelineModule._is_checkpointable in deepspeed 0.19.8.
            if recomputes and (bool(held) if recomputed is None else name in recomputed):
                backward_s += forward_s
            size = sum(each.numel() for each in held if each.requires_grad)
            found.append(LayerTime(name=name, parameters=size, forward_s=forward_s, backward_s=backward_s))
        loss_s, loss_backward_s, _ = _timed(lambda outputs: loss(outputs, targets), inputs, device)
    found = _evened(found)
    found[-1] = found[-1].plus(loss_s + making_s * (len(found) > 1), loss_backward_s)
    found[0] = found[0].plus(making_s, 0)
    return tuple(found)


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Have every generator of random numbers afterwards as it is now."""
    own, theirs = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(theirs)


def _micro_batch(trial: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, float]:
    """Inputs and targets on the device, and the seconds of making them."""
    loader = trial.build_training_data_loader()
    make = micro_batches_of(loader, trial.micro_batch_size)
    seconds = []
    for _ in range(LEAST):
        start = time.perf_counter()
        inputs, targets = tree_map_only(torch.Tensor, lambda each: each.to(device), make())
        seconds.append(_since(start, device))

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    making_s = 0.0 if getattr(loader, "num_workers", 0) else statistics.median(seconds)
    return tree_map_only(torch.Tensor, cast, inputs), targets, making_s


def _timed(call: Callable[[Any], Any], inputs: Any, device: torch.device) -> tuple[float, float, Any]:
    """Seconds of a forward and of a backward pass, medians of several, and what the first pass returned."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    began, seconds = time.perf_counter(), list[tuple[float, float]]()
    while len(seconds) <= LEAST or (len(seconds) <= MOST and time.perf_counter() - began < ENOUGH_S):
        given = tree_map_only(torch.Tensor, leaf, inputs)
        start = time.perf_counter()
        outputs = call(given)
        forward_s = _since(start, device)
        many = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        trained = [each for each in many if isinstance(each, torch.Tensor) and each.requires_grad]
        gradients = [torch.ones_like(each) for each in trained]
        start = time.perf_counter()
        if trained:
            torch.autograd.backward(trained, gradients)
        seconds.append((forward_s, _since(start, device)))
    forward_s, backward_s = (statistics.median(each) for each in zip(*seconds[1:], strict=True))
    return forward_s, backward_s, tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)


def _since(start: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _evened(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """Layers of one class and size with the median of their times, where theirs are near it: the rest is noise."""
    found = []
    for layer in layers:
        alike = [each for each in layers if (each.name, each.parameters) == (layer.name, layer.parameters)]
        middle = sorted(alike, key=lambda each: each.seconds)[len(alike) // 2]
        found.append(middle if abs(layer.seconds - middle.seconds) <= ALIKE * middle.seconds else layer)
    return found
