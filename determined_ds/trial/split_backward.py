"""A backward pass in two: for the inputs of a part, which the rank before waits for, and for its weights, later.

What the gradients of weights are made of is kept at the nodes of the graph where their way leaves that to the inputs.

Source: Qi et al. 2023, arXiv:2401.10241, section 2; ``stage_backward_input`` and ``stage_backward_weight`` in torch
2.13's ``distributed/pipelining/_backward.py``. The latter sets ``.grad`` itself, past the hooks on gradients by which
ZeRO and DeepSpeed's bf16 optimizer take them, so the weights' pass is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import stage_backward_input

Gradients = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LateWeights:
    """What the pass for the weights begins with.

    Args:
        groups: Parameters, the nodes that they hang on, and the gradients that arrived there.
        outputs: Of the part, where the whole backward pass is the weights'.
        gradients: Of the outputs.
    """

    groups: Sequence[dict[str, Any]] = ()
    outputs: Gradients = ()
    gradients: Gradients = ()


class _Joined(torch.autograd.Function):
    """The outputs of a part as one scalar, so that all its parameters lie on a way from that to the inputs."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.gradients)


def input_pass(
    outputs: Gradients,
    gradients: Gradients,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
) -> LateWeights:
    """Compute the gradients of a part's inputs, as their ``.grad``.

    Args:
        outputs: Of the part; a loss is one.
        gradients: Of each output.
        inputs: Of the part; those that require no gradient get none.
        parameters: That the part may use, each once.

    Returns:
        What :func:`weight_pass` needs.
    """
    taken = [(each, grad) for each, grad in zip(outputs, gradients, strict=True) if each.requires_grad]
    outputs, gradients = [each for each, _ in taken], [grad for _, grad in taken]
    groups: list[dict[str, Any]] = []
    if outputs and any(each.requires_grad for each in inputs):
        joined = _Joined.apply(gradients, *outputs)
        _, groups = stage_backward_input([joined], None, list(inputs), iter(parameters))
    if groups or not outputs:
        return LateWeights(groups=groups)
    return LateWeights(outputs=outputs, gradients=gradients)  # nothing waits: all of it is the weights'


def weight_pass(held: LateWeights) -> None:
    """Add the gradients of a part's weights to their ``.grad``, and free the graph.

    Args:
        held: What :func:`input_pass` returned; used up.
    """
    if held.outputs:
        torch.autograd.backward(held.outputs, held.gradients)
    # From one node of a weight that is used twice, gradients reach the next one through nodes that other groups need.
    is_kept = any(len(group["intermediates"]) > 1 for group in held.groups)
    for group in held.groups:
        arrived = zip(group.pop("intermediates"), group.pop("grads", ()), strict=False)
        taken = [(node, grads) for node, grads in arrived if any(each is not None for each in grads or ())]
        if not taken:
            continue
        edges = [
            (GradientEdge(node, index), grad)
            for node, grads in taken
            for index, grad in enumerate(grads)
            if grad is not None
        ]
        with contextlib.ExitStack() as hooks:
            # Nodes take what arrived there in the first pass: neither more from one another, nor by a hook twice.
            for node, grads in taken:
                hooks.callback(node.register_prehook(lambda _, own=grads: own).remove)
            torch.autograd.backward(
                [edge for edge, _ in edges],
                [grad for _, grad in edges],
                retain_graph=is_kept,
                inputs=[node.variable for node in group["params"]],
            )
