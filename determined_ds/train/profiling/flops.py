"""The floating-point operations of a step, counted as its matrix products and convolutions are called.

A count is of what a real step computes, on this rank: operators are counted as they run, and run as they would have.
Nothing is computed for it, no random number is drawn, and no memory is taken. It is split into

- the model's operations: of the forward pass, and of the gradients of the backward pass. Attention counts as the two
  matrix products that it stands for, four in the backward pass, the masked half of causal attention included;
- operations done again: activation checkpointing, and the scores that fused attention computes again.

The model's are those of "6 x parameters x tokens" and 12 x layers x width x tokens x sequence length for attention
(arXiv 2204.02311, appendix B), which MFU is about. Elementwise operators and embeddings count as nothing in both.

DeepSpeed's ``flops_profiler`` (deepspeed 0.19.8, ``profiling/flops_profiler/profiler.py``) counts the forward pass
alone, and takes the backward pass for twice as much, whatever needs no gradient; a kernel that a model calls by its own
name counts as nothing there. So do the operators here that torch does not know, such as those of Triton kernels.

Source: ``flop_registry`` in torch's ``utils/flop_counter.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten
# torch's registry lacks the one for CPUs.
ATTENTION_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD_OF_ATTENTION = frozenset(
    packet
    for name in (
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    if (packet := getattr(aten, name, None)) is not None
)
# Recurrent layers: their input has tokens times features, and each token meets each weight once; twice in backward.
RECURRENT = {
    getattr(aten, name): products
    for name, products in (
        ("_cudnn_rnn", 1),
        ("_cudnn_rnn_backward", 2),
        ("mkldnn_rnn_layer", 1),
        ("mkldnn_rnn_layer_backward", 2),
    )
    if hasattr(aten, name)
}
NOT_IN_BACKWARD = -1  # the graph task outside of a backward pass


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Floating-point operations of one rank.

    Args:
        forward: Of the forward pass.
        backward: Of the gradients.
        again: Of what the backward pass computes a second time.
    """

    forward: int
    backward: int
    again: int

    @property
    def model(self) -> int:
        """Those that the model needs, however it is trained: of the forward pass and of the gradients."""
        return self.forward + self.backward

    @property
    def done(self) -> int:
        """All that the device did."""
        return self.model + self.again


class FlopCount(TorchDispatchMode):
    """Counts while it is entered; may be entered again, and adds up.

    Args:
        counts: Whether what runs now counts; None: all does.
    """

    def __init__(self, counts: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._counts = counts
        self._forward = self._backward = self._again = 0

    @property
    def so_far(self) -> StepFlops:
        """What was counted."""
        return StepFlops(forward=self._forward, backward=self._backward, again=self._again)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = FORMULAS.get(packet) or _of_torch(packet)
        if formula is not None and (self._counts is None or self._counts()):
            self._add(*formula(args, kwargs or {}, out))
        return out

    def _add(self, number: int, again: int = 0) -> None:
        if torch._C._current_graph_task_id() == NOT_IN_BACKWARD:
            self._forward += number
        elif torch.is_grad_enabled():  # a forward pass inside of the backward pass
            self._again += number
        else:
            self._backward += number
        self._again += again


Formula = Callable[[Any, Any, Any], tuple[int, ...]]


def _attention(args: Any, kwargs: Any, out: Any) -> tuple[int]:
    return (int(sdpa_flop_count(*(each.shape for each in args[:3]))),)


def _attention_backward(args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Four matrix products, and one that the forward pass has done: query by key."""
    query, key, value = (each.shape for each in args[1:4])
    batch, heads, tokens, width = query
    return 2 * int(sdpa_flop_count(query, key, value)), 2 * batch * heads * tokens * key[2] * width


def _recurrent(products: int) -> Formula:
    def formula(args: Any, kwargs: Any, out: Any) -> tuple[int]:
        tokens, weights = args[0].shape[:2].numel(), []  # type: tuple[int, list[Any]]
        for each in args[1:3]:
            weights += each if isinstance(each, (list, tuple)) else [each]
        sizes = (each.numel() for each in weights if isinstance(each, torch.Tensor) and each.ndim == 2)
        return (products * 2 * tokens * sum(sizes),)

    return formula


def _of_torch(packet: Any) -> Formula | None:
    found = flop_registry.get(packet)
    return None if found is None else lambda args, kwargs, out: (int(found(*args, **kwargs, out_val=out)),)


FORMULAS: dict[Any, Formula] = {
    ATTENTION_ON_CPU: _attention,
    **dict.fromkeys(BACKWARD_OF_ATTENTION, _attention_backward),
    **{packet: _recurrent(products) for packet, products in RECURRENT.items()},
}
