"""A backward pass in two: for the inputs of a part, which the rank before waits for, and for its weights, later.

What the gradients of weights are made of is kept at the nodes of the graph where their way leaves that to the inputs.

Source: Qi et al. 2023, arXiv:2401.10241, section 2; ``stage_backward_input`` and ``stage_backward_weight`` in torch
2.13's ``distributed/pipelining/_backward.py``. The latter sets ``.grad`` itself, past the hooks on gradients by which
ZeRO and DeepSpeed's bf16 optimizer take them, so the weights' pass is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

Gradients = Sequence[torch.Tensor]
# What the pass for the weights begins with: parameters, the nodes that they hang on and the gradients that arrived
# there; or outputs and their gradients, where the whole backward pass is the weights'.
LateWeights = tuple[Sequence[dict[str, Any]], Gradients, Gradients]


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
    """Compute the gradients of a part's inputs, as their ``.grad``. Returns what :func:`weight_pass` needs.

    Args:
        outputs: Of the part; a loss is one.
        gradients: Of each output.
        inputs: Of the part; those that require no gradient get none.
        parameters: That the part may use, each once.
    """
    # Loading it takes a second, which only such a schedule needs.
    from torch.distributed.pipelining._backward import stage_backward_input

    taken = [(each, grad) for each, grad in zip(outputs, gradients, strict=True) if each.requires_grad]
    outputs, gradients = [each for each, _ in taken], [grad for _, grad in taken]
    if outputs and any(each.requires_grad for each in inputs):
        joined = _Joined.apply(gradients, *outputs)
        _, groups = stage_backward_input([joined], None, list(inputs), iter(parameters))
        if groups:
            return groups, (), ()
    return (), outputs, gradients  # nothing waits: all of it is the weights'


def weight_pass(held: LateWeights) -> None:
    """Add the gradients of a part's weights to their ``.grad``, and free the graph; ``held`` is used up."""
    groups, outputs, gradients = held
    if outputs:
        torch.autograd.backward(outputs, gradients)
    # From one node of a weight that is used twice, gradients reach the next one through nodes that other groups need.
    is_kept = any(len(group["intermediates"]) > 1 for group in groups)
    for group in groups:
        arrived = zip(group.pop("intermediates"), group.pop("grads", ()), strict=False)
        taken = [(node, grads) for node, grads in arrived if any(each is not None for each in grads or ())]
        edges = [
            (GradientEdge(node, index), grad)
            for node, grads in taken
            for index, grad in enumerate(grads)
            if grad is not None
        ]
        if not edges:
            continue
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
