"""How long a micro-batch takes in each layer of a pipeline, measured layer after layer; one is held at a time.

The way of a micro-batch::

    training data -> first layer, forward and backward, some times -> its output -> second layer ... -> loss

What is built and computed here leaves no trace: the generators of random numbers are as they were, and modules that a
trial built itself are copied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch.utils._pytree import tree_map_only

from determined_ds.documents.document import get_path
from determined_ds.pipe.partition import LayerTime
from determined_ds.trial.sample_batch import micro_batches_of

LEAST, MOST = 3, 15  # repetitions of a layer
ENOUGH_S = 0.2  # of a layer's repetitions
ALIKE = 0.25  # layers of a kind take equally long, where their times differ by no more
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def names_of(specs: Sequence[Any]) -> list[str]:
    """The name of each layer: of its class, or its function."""
    return [getattr(getattr(spec, "typename", spec), "__name__", type(spec).__name__) for spec in specs]


def measured_layers(
    trial: Any, specs: Sequence[Any], loss: Callable[[Any, Any], torch.Tensor]
) -> tuple[LayerTime, ...]:
    """Measure each layer of a trial on this rank's device; the others take no part.

    The loss belongs to the last layer. Making a micro-batch belongs to the first and to the last one, since the ranks
    of both make theirs, unless worker processes do it.

    Args:
        trial: A ``PipelineTrial``.
        specs: What its ``build_layers`` returned.
        loss: Of outputs and targets.
    """
    device = torch.device(trial.context.device)
    dtype = DTYPES[trial.resolved.strategy.precision]
    with generators_kept(device):
        inputs, targets, making_s = _micro_batch(trial, device, dtype)
        values, found = inputs, []
        for spec, name in zip(specs, names_of(specs), strict=True):
            module, call = _built(spec, device, dtype)
            forward_s, backward_s, values = _timed(call, values, device)
            found.append(_layer(trial, name, module, forward_s, backward_s))
        loss_s, loss_backward_s, _ = _timed(lambda outputs: loss(outputs, targets), values, device)
    found = _evened(found)
    found[0] = replace(found[0], forward_s=found[0].forward_s + making_s)
    last = found[-1]
    found[-1] = replace(
        last,
        forward_s=last.forward_s + loss_s + (making_s if len(found) > 1 else 0),
        backward_s=last.backward_s + loss_backward_s,
    )
    return tuple(found)


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
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


def _built(spec: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, Callable[[Any], Any]]:
    """The module of a layer, or None, and what calls it as DeepSpeed does."""
    if isinstance(spec, LayerSpec):
        module = spec.build()
    elif isinstance(spec, torch.nn.Module):
        module = copy.deepcopy(spec)
    else:
        return None, spec
    module = module.to(device, dtype) if isinstance(module, torch.nn.Module) else module
    with_function = isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
    return module, functools.partial(spec.forward_fn, module) if with_function else module


def _timed(call: Callable[[Any], Any], inputs: Any, device: torch.device) -> tuple[float, float, Any]:
    """Seconds of a forward and of a backward pass, and what the forward pass returned; each a median."""
    forward: list[float] = []
    backward: list[float] = []
    began = time.perf_counter()
    outputs = _passes(call, inputs, device)[2]
    while len(forward) < LEAST or (len(forward) < MOST and time.perf_counter() - began < ENOUGH_S):
        forward_s, backward_s, _ = _passes(call, inputs, device)
        forward.append(forward_s)
        backward.append(backward_s)
    kept = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
    return statistics.median(forward), statistics.median(backward), kept


def _passes(call: Callable[[Any], Any], inputs: Any, device: torch.device) -> tuple[float, float, Any]:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

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
    return forward_s, _since(start, device), outputs


def _since(start: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _layer(trial: Any, name: str, module: Any, forward_s: float, backward_s: float) -> LayerTime:
    held = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    again = forward_s if _is_computed_again(trial, name, bool(held)) else 0.0
    parameters = sum(each.numel() for each in held if each.requires_grad)
    return LayerTime(name=name, parameters=parameters, forward_s=forward_s, backward_s=backward_s + again)


def _is_computed_again(trial: Any, name: str, has_parameters: bool) -> bool:
    """Whether the backward pass computes a layer again.

    Source: ``PipelineModule._is_checkpointable`` and ``PipelineEngine.__init__`` in deepspeed 0.19.8.
    """
    in_json = get_path(trial.resolved.ds_config, ("pipeline", "activation_checkpoint_interval"))
    if not (in_json or trial.activation_checkpoint_interval):
        return False
    named = trial.checkpointable_layers
    return has_parameters if named is None else name in named


def _evened(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """Layers of one class and size with the median of their times, where theirs are near it: the rest is noise."""
    kinds: dict[tuple[str, int], list[LayerTime]] = {}
    for layer in layers:
        kinds.setdefault((layer.name, layer.parameters), []).append(layer)
    found = []
    for layer in layers:
        alike = kinds[layer.name, layer.parameters]
        middle = statistics.median(each.seconds for each in alike)
        if abs(layer.seconds - middle) <= ALIKE * middle:
            layer = replace(
                layer,
                forward_s=statistics.median(each.forward_s for each in alike),
                backward_s=statistics.median(each.backward_s for each in alike),
            )
        found.append(layer)
    return found
