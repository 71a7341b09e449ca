"""Real engines and passes, and the bytes that their tensors hold."""

from __future__ import annotations

import weakref
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VOCAB_SIZE, SEQUENCE_LENGTH = 256, 8


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make until they are freed, but not ``known`` ones; until it is ``stopped``."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.stopped = False
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not self.stopped:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.live_bytes += storage.nbytes()
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return output

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live_bytes -= size


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_parameters(hidden_size: int, num_layers: int) -> int:
    """Parameters of the model of :func:`measure`."""
    block = 8 * hidden_size**2 + 7 * hidden_size
    return num_layers * block + 2 * VOCAB_SIZE * hidden_size + VOCAB_SIZE


def measure(hidden_size: int, num_layers: int, ds_config: dict[str, Any]) -> dict[str, int]:
    """Train two steps of an embedding, blocks and a head in this rank; the bytes held at moments of the last one.

    Returns:
        Moment -> bytes. Moments: ``backward begins``, ``backward ends`` (the last gradient is there),
        ``after backward``, ``step``, ``after step``.
    """
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    moments: dict[str, int] = {}
    with LiveBytes() as live:

        def note(moment: str) -> None:
            moments[moment] = live.live_bytes

        blocks = [Block(hidden_size) for _ in range(num_layers)]
        first, last = nn.Embedding(VOCAB_SIZE, hidden_size), nn.Linear(hidden_size, VOCAB_SIZE)
        last.bias.register_post_accumulate_grad_hook(lambda _: note("backward begins"))
        first.weight.register_post_accumulate_grad_hook(lambda _: note("backward ends"))
        model = nn.Sequential(first, *blocks, last)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        del first, last, blocks
        register_optimizer_step_pre_hook(lambda *_: note("step"))
        for _ in range(2 * ds_config.get("gradient_accumulation_steps", 1)):
            tokens = torch.arange(SEQUENCE_LENGTH).unsqueeze(0)
            logits = engine(tokens).flatten(0, 1).float()
            engine.backward(nn.functional.cross_entropy(logits, tokens.flatten()))
            note("after backward")
            engine.step()
        note("after step")
    return moments
