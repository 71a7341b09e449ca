"""What engines hold by strategy and size, beside the estimate; and how fast memory is read and written.

1. Of each strategy a small engine is trained first: what torch and DeepSpeed allocate once and keep counts as none's.
2. A walk through an engine finds its model states; the allocator says what there was at the most of a step.
3. ZeRO 3 comes last: DeepSpeed keeps buckets of such an engine for as long as the process lives.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from determined_ds.config.strategy import Strategy
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_per_rank
from determined_ds.protocol.machine_figures import DEVICE, FROM_DEVICE, HOST, TO_DEVICE, Bandwidth, HeldStates
from determined_ds.runtime.benching.allocations import Allocations
from determined_ds.runtime.benching.bench_engine import engine_of, strategy_named
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.benching.enough_memory import too_large
from determined_ds.runtime.benching.model_sizes import shape_named
from determined_ds.runtime.benching.timing import Group
from determined_ds.runtime.checkpoints.state_bytes import base_optimizer, walk

SMALL = "1x64"
TOKENS = 8  # of the one sample: activations are to be next to nothing
COPIED_BYTES = {"cpu": 2**27, "cuda": 2**29}
COPIES_S = 0.5


def measure_memory(
    group: Group, request: BenchRequest
) -> tuple[tuple[HeldStates, ...], tuple[Bandwidth, ...]]:
    """Train a step of each model under each strategy, and copy within and between memories.

    Args:
        group: Any number of ranks.
        request: Models, strategies and precision.
    """
    bandwidths = _bandwidths(group)
    allocations = Allocations(group.device)
    found: list[HeldStates] = []
    left_out = []
    with allocations.counted():
        for name in sorted(request.strategies, key=lambda each: "zero3" in each):
            if found and group.left_s() <= 0:
                left_out.append(name)
                continue
            _held(group, allocations, SMALL, name, request.precision)
            for model in request.models:
                held = _held(group, allocations, model, name, request.precision)
                found += [] if held is None else [held]
            group.say(f"{name}: {', '.join(request.models)}")
    if left_out:
        group.notes.append(f"no time was left for {', '.join(left_out)}")
    return tuple(found), bandwidths


def _held(group: Group, allocations: Allocations, model: str, name: str, precision: str) -> HeldStates | None:
    """The rank that holds most."""
    shape = replace(shape_named(model, group.device.type), sequence_length=shape_of_text(group))
    strategy = strategy_named(name, shape, precision=precision, replicas=group.distributed.size)
    trained = replace(shape, sequence_length=TOKENS)
    if reason := too_large(group, trained, strategy):
        group.notes.append(f"{model} under {name}: {reason}")
        return None
    states, peak = _train(group, allocations, shape, strategy)
    memory = memory_per_rank(trained, strategy)
    on_host = memory.host_bytes if group.device.type == "cpu" else 0
    states, peak = (int(each) for each in group.slowest([states, peak]))
    return HeldStates(
        model=model,
        num_parameters=shape.num_parameters,
        strategy=name,
        precision=precision,
        ranks=group.distributed.size,
        state_bytes=None if strategy.offload_optimizer else states,
        estimated_state_bytes=memory.model_states_bytes,
        peak_bytes=peak if allocations.can_count else None,
        estimated_peak_bytes=memory.total_bytes + on_host if allocations.can_count else None,
    )


def shape_of_text(group: Group) -> int:
    """Tokens of a sample as the model is built for."""
    return shape_named(SMALL, group.device.type).sequence_length


def _train(group: Group, allocations: Allocations, shape: ModelShape, strategy: Strategy) -> tuple[int, int]:
    """Bytes of model states, and of all that was allocated at the most of two steps, of this rank."""
    gc.collect()  # of the engine before
    before, states = allocations.now(), [0]
    with engine_of(shape, strategy, group.device) as engine, allocations.peak() as most:
        hooks = _watch(engine, lambda: states.append(sum(walk(engine).values())))
        for _ in range(2):
            engine.backward(engine(engine.module.random_tokens(1, TOKENS)))
            engine.step()
        for hook in hooks:
            hook.remove()
        group.synchronize()
    return max(states), most[0] - before


def _watch(engine: Any, found: Callable[[], None]) -> list[Any]:
    """Look as the backward pass ends, which comes to the first layer last, and as the optimizer steps."""
    first = engine.module.tokens.weight
    return [
        first.register_post_accumulate_grad_hook(lambda _: found()),
        base_optimizer(engine).register_step_pre_hook(lambda *_: found()),
    ]


# --------------------------------------------------------------------------------------- bandwidths


def _bandwidths(group: Group) -> tuple[Bandwidth, ...]:
    """Of copies, by all ranks at once; the slowest rank's."""
    device = group.device
    elements = COPIED_BYTES[device.type] // 4
    own = torch.zeros(2, elements, device=device)
    copies: dict[str, tuple[Callable[[], object], int]] = {DEVICE: (lambda: own[1].copy_(own[0]), 2)}
    if device.type == "cuda":
        host = torch.zeros(2, elements).pin_memory()
        copies[TO_DEVICE] = (lambda: own[0].copy_(host[0], non_blocking=True), 1)
        copies[FROM_DEVICE] = (lambda: host[0].copy_(own[0], non_blocking=True), 1)
        copies[HOST] = (lambda: host[1].copy_(host[0]), 2)
    found = []
    for place, (copy, times) in copies.items():
        seconds = [group.timed(copy) for _ in range(3)]
        until = time.monotonic() + COPIES_S
        while time.monotonic() < until:
            started = time.perf_counter()
            copy()
            group.synchronize()
            seconds.append(time.perf_counter() - started)
        [slowest] = group.slowest([sorted(seconds[1:])[len(seconds) // 2 - 1]])
        ranks = int(group.distributed.local_size)
        found.append(Bandwidth(place=place, ranks=ranks, bytes_per_s=times * 4 * elements / slowest))
    group.say("bandwidth of " + ", ".join(copies))
    return tuple(found)
