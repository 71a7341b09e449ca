"""``sdpa_kernel``: which of torch's kernels computes ``scaled_dot_product_attention`` in this process."""

from __future__ import annotations

import torch

from determined_ds.config.hyperparameters import SDPA_KERNELS

_before: list[tuple[bool, ...]] = []


def choose_sdpa_kernel(kernel: str | None) -> None:
    """Have torch take one kernel, and ``math`` where that one cannot; None leaves the choice to torch.

    It holds for the whole process, also for what is compiled in it. In half precision on a CPU torch chooses its fused
    kernel, whose backward pass is there slower than plain matrix products: ``math`` in bf16 made a step of GPT-2
    twice as fast (torch 2.13). It adds up in half precision, so that a loss is to be compared before it is taken.

    Args:
        kernel: Of :data:`determined_ds.config.hyperparameters.SDPA_KERNELS`.

    Source: ``torch.backends.cuda``, whose switches hold on CPUs too (``sdp_utils_cpp.cpp`` in torch 2.13).
    """
    cuda = torch.backends.cuda
    if kernel is None:
        if _before:
            _set(*_before.pop())
        return
    if not _before:
        _before.append(
            (
                cuda.flash_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
                cuda.cudnn_sdp_enabled(),
                cuda.fp16_bf16_reduction_math_sdp_allowed(),
            )
        )
    assert kernel in SDPA_KERNELS, kernel
    _set(kernel == "flash", kernel == "efficient", kernel == "cudnn", kernel == "math")


def _set(flash: bool, efficient: bool, cudnn: bool, reduced: bool) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_cudnn_sdp(cudnn)
    cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
    # What was compiled with one kernel is otherwise taken from torch's cache for another.
    torch.compiler.config.cache_key_tag = f"sdpa {flash} {efficient} {cudnn} {reduced}"
