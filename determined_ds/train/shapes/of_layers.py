"""What each layer of a pipeline keeps and hands on: measured on torch's meta device, one after the other.

The way of a layer::

    its inputs, cut off from the layers before -> forward: what stays -> backward: the peak
                                               -> forward again -> backward in two: what stays in between

Parameters have gradients already, as from the second micro-batch of a step on: what is added to them is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from determined_ds.memory.model import LayerBytes, LayerShape
from determined_ds.train.shapes.bare_trial import Layer
from determined_ds.train.shapes.counting import (
    DTYPES,
    FusedAttention,
    LiveBytes,
    first_sentence,
    run_backward,
)
from determined_ds.trial.split_backward import input_pass, weight_pass


def try_to_measure_layers(
    layers: Sequence[Layer],
    batch_of: Callable[[int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Any],
    precision: str,
) -> tuple[tuple[LayerShape, ...], tuple[str, ...]]:
    """Measure a pipeline's layers, if they run on the meta device.

    Args:
        layers: In order; they are cast to ``precision``.
        batch_of: Inputs and targets of a micro-batch of so many samples.
        loss: Of outputs and targets; it counts with the last layer.
        precision: ``bf16``, ``fp16`` or ``fp32``.

    Returns:
        The layers; without bytes, and with the reason, where they do not run.
    """
    found: list[list[dict[str, int]]] = [[], []]
    reason: tuple[str, ...] = ()
    try:
        for each in layers:
            each.to(DTYPES[precision]).train()
        found = [list(_measured(layers, *batch_of(samples), loss)) for samples in (1, 2)]
    except Exception as error:
        reason = (f"stages of even activations (a layer does not run alone: {first_sentence(error)})",)
    shapes = []
    for index, each in enumerate(layers):
        own = list(each.parameters())
        one, two = (of_each[index] if of_each else {} for of_each in found)
        shapes.append(
            LayerShape(
                name=each.name,
                num_parameters=sum(p.numel() for p in own),
                num_trainable_parameters=sum(p.numel() for p in own if p.requires_grad),
                tied_key=each.tied_key,
                **_growing(one, two),
            )
        )
    return tuple(shapes), reason


def _growing(one: dict[str, int], two: dict[str, int]) -> dict[str, LayerBytes]:
    """What does not grow with the samples, and what does, by the bytes of one and of two."""
    more = {name: max(0, two[name] - one[name]) for name in one}
    fixed = {name: max(0, one[name] - more[name]) for name in one}
    return {"fixed": LayerBytes(**fixed), "per_sample": LayerBytes(**more)}


def _measured(
    layers: Sequence[Layer], inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]
) -> Iterator[dict[str, int]]:
    modules = torch.nn.ModuleList(layers)
    parameters = [each for each in modules.parameters() if each.requires_grad]
    for each in parameters:
        each.grad = torch.zeros_like(each)
    known = [*modules.parameters(), *modules.buffers(), *(each.grad for each in parameters)]
    known += [each for each in tree_leaves((inputs, targets)) if isinstance(each, torch.Tensor)]
    try:
        with LiveBytes(known) as live, FusedAttention():
            for index, layer in enumerate(layers):
                is_last = index == len(layers) - 1
                after = (lambda outputs: loss(outputs, targets)) if is_last else None
                measured, inputs = _of_layer(layer, _cut_off(inputs, index > 0), after, live)
                yield measured
    finally:
        for each in parameters:
            each.grad = None


def _of_layer(
    layer: Layer, inputs: Any, after: Callable[[Any], Any] | None, live: LiveBytes
) -> tuple[dict[str, int], Any]:
    """Bytes of a layer, and its outputs."""
    found, start = {"inputs": _bytes(inputs)}, live.begin()
    outputs = layer(inputs)
    handed_on = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
    found |= {"outputs": _bytes(outputs), "unsaved": 0}
    if after is not None:
        outputs, with_outputs = after(outputs), live.live_bytes
        del handed_on
        handed_on, found["unsaved"] = None, with_outputs - live.live_bytes
    found |= {"kept": live.live_bytes - start, "forward": live.peak_bytes - start}
    floats = [each for each in _tensors(outputs) if each.requires_grad]
    gradients = [torch.empty_like(each) for each in floats]
    begin = live.begin()
    if floats:
        run_backward(floats, gradients)
    found["backward"] = found["kept"] + live.peak_bytes - begin
    del outputs, floats, gradients
    _forget_gradients(inputs)
    return found | _in_two(layer, inputs, after, live), handed_on


def _in_two(layer: Layer, inputs: Any, after: Callable[[Any], Any] | None, live: LiveBytes) -> dict[str, int]:
    """The same of a backward pass in two."""
    start = live.begin()
    outputs = layer(inputs)
    if after is not None:
        outputs = after(outputs)
    kept = live.live_bytes - start
    floats = [each for each in _tensors(outputs) if each.requires_grad]
    gradients = [torch.empty_like(each) for each in floats]
    parameters = [each for each in layer.parameters() if each.requires_grad]
    begin = live.begin()
    held = input_pass(floats, gradients, _tensors(inputs), parameters)
    most = kept + live.peak_bytes - begin
    gradients.clear()
    _forget_gradients(inputs)
    left = live.live_bytes - start - kept
    del outputs, floats
    split = live.begin() - start
    weight_pass(held)
    return {
        "split": split,
        "gradients": left,
        "input_pass": most,
        "weight_pass": live.peak_bytes - start,
    }


def _forget_gradients(inputs: Any) -> None:
    for each in _tensors(inputs):
        each.grad = None


def _cut_off(inputs: Any, has_gradient: bool) -> Any:
    """As another part's outputs, whose gradient is sent there."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(has_gradient and tensor.is_floating_point())

    return tree_map_only(torch.Tensor, leaf, inputs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tree: Any) -> int:
    return sum(each.numel() * each.element_size() for each in _tensors(tree))
