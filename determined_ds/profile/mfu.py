"""Model FLOPs utilization: the operations of a step, counted as they run, and the peak of a device, measured.

Only the model's operations count, on this rank: those of the forward pass, and of the gradients of the backward pass.
Attention counts as the two matrix products that it stands for, four in the backward pass, the masked half of causal
attention included. What is done again, by activation checkpointing or by fused attention, does not count. These are
the operations of "6 x parameters x tokens" and 12 x layers x width x tokens x sequence length for attention
(arXiv 2204.02311, appendix B). Operators that torch does not know, such as those of Triton kernels, count as nothing.

Source: ``flop_registry`` in torch's ``utils/flop_counter.py``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

NOT_IN_BACKWARD = -1  # the graph task outside of a backward pass
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of the square matrices. Smaller ones do not fill a device, larger ones take memory and no more of it.
SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
AT_A_TIME = 10  # products on a GPU between two looks at the clock
MEASURED_S = 0.3


class FlopCount(TorchDispatchMode):
    """Counts the model's operations while it is entered, again and again, and ``counts()`` says that they count."""

    def __init__(self, counts: Callable[[], bool]) -> None:
        super().__init__()
        self._counts = counts
        self.model = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        # A forward pass inside of the backward pass, where gradients are enabled, is done again.
        again = torch._C._current_graph_task_id() != NOT_IN_BACKWARD and torch.is_grad_enabled()
        if not again and self._counts():
            name = packet.__name__
            if name == "_scaled_dot_product_flash_attention_for_cpu":  # torch's registry lacks it
                self.model += int(sdpa_flop_count(*(each.shape for each in args[:3])))
            elif name.startswith("_scaled_dot_product") and name.endswith("_backward"):
                self.model += 2 * int(sdpa_flop_count(*(each.shape for each in args[1:4])))
            elif known := flop_registry.get(packet):
                self.model += int(known(*args, **kwargs, out_val=out))
        return out


@functools.cache
@torch.no_grad()
def peak_flops(device: torch.device, precision: str, *, seconds: float = MEASURED_S) -> float | None:
    """The floating-point operations a second that large matrix products reach on a device; measured once a process.

    It is the peak of this device as it is clocked, cooled and shared, with torch's threads and setting of TF32. The
    peak memory that torch counts is reset: call it before engines are built. On a CPU, measure on all ranks at once.

    Returns:
        Floating-point operations a second; None where a GPU has no room for the matrices.
    """
    is_cuda, dtype, fastest = device.type == "cuda", DTYPES[precision], 0.0
    sizes = SIZES["cuda" if is_cuda else "cpu"]
    sync = functools.partial(torch.cuda.synchronize, device) if is_cuda else lambda: None
    times = AT_A_TIME if is_cuda else 1
    try:
        for size in sizes:
            # Not constant: a GPU draws less power for equal bits, and so is clocked higher than in training.
            left = torch.arange(size * size, dtype=torch.float32, device=device).sin_()
            left = left.reshape(size, size).to(dtype)
            right, product = left.t().contiguous(), torch.empty_like(left)
            torch.mm(left, right, out=product)  # chooses a kernel
            until = time.perf_counter() + seconds / len(sizes)
            while time.perf_counter() < until:
                sync()
                start = time.perf_counter()
                for _ in range(times):
                    torch.mm(left, right, out=product)
                sync()
                fastest = max(fastest, 2.0 * size**3 * times / (time.perf_counter() - start))
    except torch.OutOfMemoryError:
        return None
    finally:
        left = right = product = None  # type: ignore[assignment]
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return fastest
