"""Real engines, and what they hold by the account of the C library that gave them the memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

VOCAB_SIZE, SEQUENCE_LENGTH = 256, 8
BLOCK_NORMS = 2


def model_parameters(hidden_size: int, num_layers: int) -> int:
    """Parameters of :func:`build`."""
    block = 8 * hidden_size**2 + 5 * hidden_size + BLOCK_NORMS * hidden_size
    return num_layers * block + 2 * VOCAB_SIZE * hidden_size + VOCAB_SIZE


def build(hidden_size: int, num_layers: int) -> Any:
    """An embedding, residual feed-forward blocks, a head."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(hidden_size)
            self.up = nn.Linear(hidden_size, 4 * hidden_size)
            self.down = nn.Linear(4 * hidden_size, hidden_size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    return nn.Sequential(
        nn.Embedding(VOCAB_SIZE, hidden_size),
        *(Block() for _ in range(num_layers)),
        nn.Linear(hidden_size, VOCAB_SIZE),
    )


def measure(hidden_size: int, num_layers: int, ds_config: dict[str, Any]) -> dict[str, int]:
    """Train two steps in this rank; the bytes held at the moments of the last one.

    Returns:
        Moment -> bytes in large blocks that were allocated since the model was built. Moments: ``backward begins``,
        ``backward ends`` (the last gradient is there), ``after backward``, ``step``, ``after step``.
    """
    import deepspeed

    libc = ctypes.CDLL("libc.so.6")
    assert libc.mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES) == 1
    held = _take_free_room(libc)
    try:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        # What torch and DeepSpeed allocate once and keep is none of an engine's.
        _train(64, 1, ds_config, libc)
        _loss_of(build(hidden_size, num_layers).to(_dtype(ds_config))).backward()
        return _train(hidden_size, num_layers, ds_config, libc)
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # where glibc's own moving threshold ends
        for block in held:
            libc.free(ctypes.c_void_p(block))


def _dtype(ds_config: dict[str, Any]) -> Any:
    import torch

    return torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32


def _loss_of(model: Any) -> Any:
    import torch

    tokens = torch.arange(SEQUENCE_LENGTH).unsqueeze(0)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _train(hidden_size: int, num_layers: int, ds_config: dict[str, Any], libc: Any) -> dict[str, int]:
    import deepspeed
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    torch.manual_seed(0)
    gc.collect()
    before = large_blocks(libc)
    model = build(hidden_size, num_layers)
    moments: dict[str, int] = {}
    engine: Any = None

    def note(moment: str) -> None:
        if engine is not None:
            moments[moment] = large_blocks(libc) - before

    first, last = model[0].weight, model[-1].bias
    last.register_post_accumulate_grad_hook(lambda _: note("backward begins"))
    first.register_post_accumulate_grad_hook(lambda _: note("backward ends"))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    del first, last
    at_step = register_optimizer_step_pre_hook(lambda *_: note("step"))
    for _ in range(2 * ds_config.get("gradient_accumulation_steps", 1)):
        engine.backward(_loss_of(engine))
        note("after backward")
        engine.step()
    note("after step")
    at_step.remove()
    engine.destroy()
    return moments


# ------------------------------------------------------------------------------- by the C library's account

M_MMAP_THRESHOLD = -3
BLOCK_BYTES = 16 * 2**10  # from here on, a block is mapped by itself, and counted in hblkhd to the page


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(f"before_{index}", ctypes.c_size_t) for index in range(4)] + [
        ("hblkhd", ctypes.c_size_t),
        *((f"after_{index}", ctypes.c_size_t) for index in range(5)),
    ]


def _take_free_room(libc: Any) -> list[int]:
    """Allocate what is free in the heap, so that large blocks come from the system, where they are counted."""
    libc.malloc.restype = ctypes.c_void_p
    held, before = [], large_blocks(libc)
    while large_blocks(libc) == before:
        held.append(libc.malloc(ctypes.c_size_t(BLOCK_BYTES)))
    return held


def large_blocks(libc: Any) -> int:
    """Bytes that this process holds in blocks of :data:`BLOCK_BYTES` or more, whoever asked for them."""
    libc.mallinfo2.restype = _Mallinfo2
    return int(libc.mallinfo2().hblkhd)


def pass_bytes(model: Any, loss_of: Callable[[], Any]) -> int:
    """Bytes that a forward and a backward pass hold at the peak, parameters and their gradients aside; in this rank."""
    from torch.utils._python_dispatch import TorchDispatchMode

    libc = ctypes.CDLL("libc.so.6")

    class AfterEachOperator(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            self.most = max(self.most, large_blocks(libc))
            return output

    def free(parameter: Any) -> None:
        parameter.grad = None

    assert libc.mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES) == 1
    held = _take_free_room(libc)
    try:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(free)
        loss_of().backward()  # what torch allocates once
        gc.collect()
        before = large_blocks(libc)
        with AfterEachOperator() as noted:
            loss_of().backward()
        return noted.most - before
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        for block in held:
            libc.free(ctypes.c_void_p(block))
