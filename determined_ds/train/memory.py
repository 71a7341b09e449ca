"""The memory of a rank: what it has held, and its model states."""

from __future__ import annotations

import contextlib
import itertools
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from determined_ds.memory.units import GIB


def peak_bytes(device: torch.device) -> int:
    """The most that this rank has held: in tensors on its GPU; on a CPU, resident memory of its process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(int(psutil.Process().memory_info().rss), peak if sys.platform == "darwin" else peak * 1024)


def memory_metrics(peaks: Sequence[int]) -> dict[str, float]:
    """The metrics, of the ranks with most and least bytes: numbers and no lists, which the web UI does not draw."""
    return {"peak_memory_gib": max(peaks) / GIB, "peak_memory_gib_min": min(peaks) / GIB}


def watch(engine: Any, found: Callable[[int], None]) -> Callable[[], None]:
    """Measure an engine's model states as each optimizer step begins, when parameters, gradients and states all exist.

    ZeRO 1 has whole gradients only until then, so below stage 2 they are also measured as each backward pass ends.
    From stage 2 on, those are in the communication bucket, which is not a model state. ``found`` is called with the
    bytes of this rank; what is returned ends the watch.
    """

    def look(*_: Any) -> None:
        zero, base = engine.optimizer, base_optimizer(engine)
        held = [each for group in base.param_groups for each in group["params"]]
        held += (each for state in base.state.values() for each in state.values() if getattr(each, "ndim", 0))
        for each in engine.module.parameters():
            held += (getattr(each, "ds_tensor", each.data), each.grad, getattr(each, "grad_accum", None))
        for name in ("averaged_gradients", "all_grad_tensors"):
            held += itertools.chain(*(group or () for group in getattr(zero, name, {}).values()))
        for name in ("fp32_groups_gradients_flat", "fp32_partitioned_groups_flat"):  # ZeRO 3 hides the latter
            held += getattr(zero, name, ())
        held.append(getattr(zero, "grad_partitions_flat_buffer", None))
        storages = [each.untyped_storage() for each in held if hasattr(each, "untyped_storage")]
        found(sum({each.data_ptr(): each.nbytes() for each in storages}.values()))  # each counts once

    hooks = contextlib.ExitStack()
    hooks.callback(base_optimizer(engine).register_step_pre_hook(look).remove)
    # The backward pass comes to the first layer last.
    first = next((parameter for parameter in engine.module.parameters() if parameter.requires_grad), None)
    if first is not None and engine.zero_optimization_stage() < 2:
        hooks.callback(first.register_post_accumulate_grad_hook(look).remove)
    return hooks.close


def base_optimizer(engine: Any) -> Any:
    """torch's own optimizer, inside the one that DeepSpeed wraps around it."""
    return getattr(engine.optimizer, "optimizer", None) or engine.optimizer
