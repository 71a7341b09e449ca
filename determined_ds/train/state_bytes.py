"""Bytes of an engine's model states, counted by a walk through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def walk(engine: Any) -> dict[str, int]:
    """Bytes of this rank by kind: ``parameters``, ``gradients`` and ``optimizer_states``.

    Every storage counts once: a parameter does not count as an optimizer state. Gradients exist only between a backward
    pass and the optimizer's step, see :func:`watch`.

    Args:
        engine: DeepSpeed's, at any ZeRO stage, or one with its ``module`` and ``optimizer``.
    """
    found = dict.fromkeys(KINDS, 0)
    seen: set[int] = set()
    for kind, tensors in KINDS.items():
        for tensor in tensors(engine):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                found[kind] += int(storage.nbytes())
    return found


def watch(engine: Any, found: Callable[[dict[str, int]], None]) -> Callable[[], None]:
    """Walk an engine as each optimizer step begins, when parameters, gradients and states all exist.

    ZeRO 1 has whole gradients only until then, so below stage 2 the engine is also walked as each backward pass ends.
    From stage 2 on, those are in the communication bucket, which is not a model state.

    Args:
        engine: As for :func:`walk`.
        found: Called with the result of each walk.

    Returns:
        Call it to stop watching.
    """

    def look(*_: Any) -> None:
        found(walk(engine))

    handles = [base_optimizer(engine).register_step_pre_hook(look)]
    # The backward pass comes to the first layer last.
    first = next((parameter for parameter in engine.module.parameters() if parameter.requires_grad), None)
    if first is not None and engine.zero_optimization_stage() < 2:
        handles.append(first.register_post_accumulate_grad_hook(look))

    def let_go() -> None:
        for handle in handles:
            handle.remove()

    return let_go


def base_optimizer(engine: Any) -> Any:
    """torch's own optimizer, inside the one that DeepSpeed wraps around it."""
    return getattr(engine.optimizer, "optimizer", None) or engine.optimizer


def _parameters(engine: Any) -> Iterator[Any]:
    for parameter in engine.module.parameters():
        yield getattr(parameter, "ds_tensor", parameter.data)


def _gradients(engine: Any) -> Iterator[Any]:
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        yield from (g for g in (parameter.grad, getattr(parameter, "grad_accum", None)) if g is not None)
    for name in ("averaged_gradients", "all_grad_tensors"):
        for group in getattr(zero, name, {}).values():
            yield from group or ()
    yield from getattr(zero, "fp32_groups_gradients_flat", ())
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    yield from () if flat is None else (flat,)


def _optimizer_states(engine: Any) -> Iterator[Any]:
    base = base_optimizer(engine)
    for group in base.param_groups:
        yield from group["params"]
    # ZeRO 3 hides them between steps.
    yield from getattr(engine.optimizer, "fp32_partitioned_groups_flat", ())
    for state in base.state.values():
        yield from (value for value in state.values() if hasattr(value, "untyped_storage") and value.ndim)


KINDS = {"parameters": _parameters, "gradients": _gradients, "optimizer_states": _optimizer_states}
