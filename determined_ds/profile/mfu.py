"""Model FLOPs utilization: the operations of a step, counted as they run, and the peak of a device, measured.

A count is of what a real step computes, on this rank: operators are counted as they run, and run as they would have.
Nothing is computed for it, no random number is drawn, and no memory is taken. Only the model's operations count: those
of the forward pass, and of the gradients of the backward pass. Attention counts as the two matrix products that it
stands for, four in the backward pass, the masked half of causal attention included. What is done again, by activation
checkpointing or by fused attention, does not count. These are the operations of "6 x parameters x tokens" and
12 x layers x width x tokens x sequence length for attention (arXiv 2204.02311, appendix B). Elementwise operators and
embeddings count as nothing in both, and so do operators that torch does not know, such as those of Triton kernels.

Source: ``flop_registry`` in torch's ``utils/flop_counter.py``. DeepSpeed's ``flops_profiler`` counts the forward pass
alone (deepspeed 0.19.8, ``profiling/flops_profiler/profiler.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten
ATTENTION_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # torch's registry lacks it
BACKWARD_OF_ATTENTION = (
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
# Recurrent layers: their input has tokens times features, and each token meets each weight once; twice in backward.
RECURRENT = {
    "_cudnn_rnn": 1,
    "_cudnn_rnn_backward": 2,
    "mkldnn_rnn_layer": 1,
    "mkldnn_rnn_layer_backward": 2,
}
NOT_IN_BACKWARD = -1  # the graph task outside of a backward pass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of the square matrices. Smaller ones do not fill a device, larger ones take memory and no more of it.
SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
AT_A_TIME = 10  # products on a GPU between two looks at the clock


class FlopCount(TorchDispatchMode):
    """Counts the model's floating-point operations while it is entered; may be entered again, and adds up.

    Args:
        counts: Whether what runs now counts; None: all does.
    """

    def __init__(self, counts: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self._counts = counts
        self.model = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        # A forward pass inside of the backward pass, where gradients are enabled, is done again.
        again = torch._C._current_graph_task_id() != NOT_IN_BACKWARD and torch.is_grad_enabled()
        if not again and (self._counts is None or self._counts()):
            if formula := FORMULAS.get(packet):
                self.model += formula(args)
            elif known := flop_registry.get(packet):
                self.model += int(known(*args, **kwargs, out_val=out))
        return out


def _recurrent(products: int) -> Callable[[Any], int]:
    def formula(args: Any) -> int:
        tokens, weights = args[0].shape[:2].numel(), []  # type: tuple[int, list[Any]]
        for each in args[1:3]:
            weights += each if isinstance(each, (list, tuple)) else [each]
        sizes = (each.numel() for each in weights if isinstance(each, torch.Tensor) and each.ndim == 2)
        return products * 2 * tokens * sum(sizes)

    return formula


FORMULAS: dict[Any, Callable[[Any], int]] = {
    getattr(aten, name): formula
    for name, formula in {
        ATTENTION_ON_CPU: lambda args: int(sdpa_flop_count(*(each.shape for each in args[:3]))),
        **dict.fromkeys(
            BACKWARD_OF_ATTENTION,
            lambda args: 2 * int(sdpa_flop_count(*(each.shape for each in args[1:4]))),
        ),
        **{name: _recurrent(products) for name, products in RECURRENT.items()},
    }.items()
    if hasattr(aten, name)
}

# ------------------------------------------------------------------------------------------- the peak

_peaks: dict[tuple[torch.device, str], float] = {}


def peak_flops(device: torch.device, precision: str, *, seconds: float = 0.3) -> float | None:
    """The floating-point operations a second that large matrix products reach on a device; measured once a process.

    It is the peak of this device as it is clocked, cooled and shared, with the threads that this process computes with
    on a CPU, and with torch's current setting of TF32 on a GPU. Random number generators are left as they are, no
    memory is kept, and the peak memory that torch counts is as if nothing had been measured: call it before engines are
    built, and there is room.

    Args:
        device: A CPU or a CUDA device. On a CPU, measure on all ranks at once: they share its cores.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seconds: How long to measure, about.

    Returns:
        Floating-point operations a second; None where a GPU has no room for the matrices.
    """
    if (device, precision) not in _peaks:
        is_cuda = device.type == "cuda"
        sizes = SIZES["cuda" if is_cuda else "cpu"]
        try:
            found = [_fastest(device, DTYPES[precision], size, seconds / len(sizes)) for size in sizes]
        except torch.OutOfMemoryError:
            return None
        finally:
            if is_cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
        _peaks[device, precision] = max(found)
    return _peaks[device, precision]


@torch.no_grad()
def _fastest(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    # Not constant: a GPU draws less power for equal bits, and so is clocked higher than in training.
    left = torch.arange(size * size, dtype=torch.float32, device=device).sin_().reshape(size, size).to(dtype)
    right, product = left.t().contiguous(), torch.empty_like(left)
    torch.mm(left, right, out=product)  # chooses a kernel
    fastest, until = float("inf"), time.perf_counter() + seconds
    while True:
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(AT_A_TIME):
                torch.mm(left, right, out=product)
            end.record()
            end.synchronize()
            taken = float(begin.elapsed_time(end)) / 1000 / AT_A_TIME
        else:
            start = time.perf_counter()
            torch.mm(left, right, out=product)
            taken = time.perf_counter() - start
        fastest = min(fastest, taken)
        if time.perf_counter() >= until:
            return 2.0 * size**3 / fastest
