"""The peak of a device: the floating-point operations a second that large matrix products reach on it.

Measured, not looked up: it is the peak of this device as it is clocked, cooled and shared, with the threads that this
process computes with on a CPU, and with torch's current setting of TF32 on a GPU.
"""

from __future__ import annotations

import time

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of the square matrices. Smaller ones do not fill a device, larger ones take memory and no more of it.
SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
AT_A_TIME = 10  # products on a GPU between two looks at the clock


def peak_flops_by_precision(device: torch.device, *, seconds: float = 0.3) -> dict[str, float]:
    """The peak of a device in each precision that it computes in: fp32 and bf16, and fp16 on GPUs.

    Args:
        device: A CPU or a CUDA device. On a CPU, measure on all ranks at once: they share its cores.
        seconds: How long to measure each precision, about.

    Returns:
        Precision -> floating-point operations a second.
    """
    precisions = DTYPES if device.type == "cuda" else ("fp32", "bf16")
    return {precision: peak_flops(device, precision, seconds=seconds) for precision in precisions}


def peak_flops(device: torch.device, precision: str, *, seconds: float = 0.3) -> float:
    """The peak of a device in a precision: the fastest of the matrix products done in a time.

    Random number generators are left as they are, and no memory is kept.

    Args:
        device: A CPU or a CUDA device.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seconds: How long to measure, about.

    Returns:
        Floating-point operations a second.
    """
    sizes = SIZES["cuda" if device.type == "cuda" else "cpu"]
    return max(_fastest(device, DTYPES[precision], size, seconds / len(sizes)) for size in sizes)


@torch.no_grad()
def _fastest(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    # Not constant: a GPU draws less power for equal bits, and so is clocked higher than in training.
    left = torch.arange(size * size, dtype=torch.float32, device=device).sin_().reshape(size, size).to(dtype)
    right, product = left.t().contiguous(), torch.empty_like(left)
    torch.mm(left, right, out=product)  # chooses a kernel
    fastest, until = float("inf"), time.perf_counter() + seconds
    while True:
        fastest = min(fastest, _seconds_a_product(left, right, product))
        if time.perf_counter() >= until:
            return 2.0 * size**3 / fastest


def _seconds_a_product(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> float:
    if left.device.type != "cuda":
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(AT_A_TIME):
        torch.mm(left, right, out=product)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / AT_A_TIME
