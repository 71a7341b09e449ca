"""Real engines, and what they hold by the account of the C library that gave them the memory."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

VOCAB_SIZE, SEQUENCE_LENGTH = 256, 8
M_MMAP_THRESHOLD = -3
BLOCK_BYTES = 16 * 2**10  # from here on, a block is mapped by itself, and counted in hblkhd to the page


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def model_parameters(hidden_size: int, num_layers: int) -> int:
    """Parameters of :func:`build`."""
    block = 8 * hidden_size**2 + 7 * hidden_size
    return num_layers * block + 2 * VOCAB_SIZE * hidden_size + VOCAB_SIZE


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(hidden_size: int, num_layers: int) -> Any:
    """An embedding, blocks, a head."""
    blocks = [Block(hidden_size) for _ in range(num_layers)]
    return nn.Sequential(nn.Embedding(VOCAB_SIZE, hidden_size), *blocks, nn.Linear(hidden_size, VOCAB_SIZE))


def measure(hidden_size: int, num_layers: int, ds_config: dict[str, Any]) -> dict[str, int]:
    """Train two steps in this rank; the bytes held at the moments of the last one.

    Returns:
        Moment -> bytes in large blocks that were allocated since the model was built. Moments: ``backward begins``,
        ``backward ends`` (the last gradient is there), ``after backward``, ``step``, ``after step``.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, _Mallinfo2
    assert libc.mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES) == 1
    # What is free in the heap is allocated, so that large blocks come from the system, where they are counted.
    held, before = [], large_blocks(libc)
    while large_blocks(libc) == before:
        held.append(libc.malloc(ctypes.c_size_t(BLOCK_BYTES)))
    try:
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        # What torch and DeepSpeed allocate once and keep is none of an engine's.
        _train(64, 1, ds_config, libc)
        model = build(hidden_size, num_layers)
        _loss_of(model.bfloat16() if ds_config["bf16"]["enabled"] else model).backward()
        del model
        return _train(hidden_size, num_layers, ds_config, libc)
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # where glibc's own moving threshold ends
        for block in held:
            libc.free(ctypes.c_void_p(block))


def _loss_of(model: Any) -> Any:
    tokens = torch.arange(SEQUENCE_LENGTH).unsqueeze(0)
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def _train(hidden_size: int, num_layers: int, ds_config: dict[str, Any], libc: Any) -> dict[str, int]:
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


def large_blocks(libc: Any) -> int:
    """Bytes that this process holds in blocks of :data:`BLOCK_BYTES` or more, whoever asked for them."""
    return int(libc.mallinfo2().hblkhd)
