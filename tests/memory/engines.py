"""Real engines and pipelines, and the bytes that their tensors hold, in a rank."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from determined_ds import PipelineTrial, Trainer, open_context

HIDDEN, LAYERS, VOCAB_SIZE, SEQUENCE_LENGTH = 256, 4, 256, 8


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


def measure(ds_config: dict[str, Any]) -> dict[str, int]:
    """Train two steps of an embedding, blocks and a head; the bytes held at moments of the last one."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    moments: dict[str, int] = {}
    with LiveBytes() as live:

        def note(moment: str) -> None:
            moments[moment] = live.live_bytes

        blocks = [Block(HIDDEN) for _ in range(LAYERS)]
        first, last = nn.Embedding(VOCAB_SIZE, HIDDEN), nn.Linear(HIDDEN, VOCAB_SIZE)
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


# ------------------------------------------------------------------------------------------- a pipeline

TOKENS, WIDTH, LENGTH, BLOCKS = 64, 32, 64, 8


def scores(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embedding.weight)


class PipedTrial(PipelineTrial):
    """An embedding, residual blocks, a head that is tied to it."""

    partition_method = "uniform"
    peak_bytes = 0

    def build_layers(self) -> list[Any]:
        tied = ("tokens", nn.Embedding, TOKENS, WIDTH)
        blocks = [LayerSpec(Block, WIDTH) for _ in range(BLOCKS)]
        head = [LayerSpec(nn.LayerNorm, WIDTH), TiedLayerSpec(*tied, forward_fn=scores)]
        return [TiedLayerSpec(*tied), *blocks, *head]

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def build_training_data_loader(self) -> Any:
        return self.training_loader([(torch.zeros(LENGTH, dtype=torch.long),) * 2] * 512)

    def build_validation_data_loader(self) -> Any:
        return self.validation_loader([(torch.zeros(LENGTH, dtype=torch.long),) * 2] * 4)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        with LiveBytes(*self.engine.module.parameters(), *self.engine.module.buffers()) as live:
            at_step = register_optimizer_step_pre_hook(lambda *_: setattr(live, "stopped", True))
            result = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
            at_step.remove()
        self.peak_bytes = live.peak_bytes
        return result


def train(run_dir: Path, hparams: dict[str, Any]) -> tuple[int, int]:
    """Two steps: the most bytes that the passes of the second hold beside parameters and gradients; parameters."""
    from determined.pytorch import Batch

    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = PipedTrial(context)
        Trainer(trial, context).fit(max_length=Batch(2), checkpoint_policy="none")
        own = sum(each.numel() for each in trial.engine.module.parameters())
    return trial.peak_bytes - 4 * own, own
