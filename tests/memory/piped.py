"""A pipeline as its author writes it, and the most that the tensors of its passes take at a time, in a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from determined_ds import PipelineTrial, Trainer, open_context
from tests.memory.engines import Block, LiveBytes

VOCAB_SIZE, HIDDEN, LENGTH, BLOCKS = 64, 32, 64, 8


def scores(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embedding.weight)


class PipedTrial(PipelineTrial):
    """An embedding, residual blocks, a head that is tied to it."""

    partition_method = "uniform"
    peak_bytes = 0

    def build_layers(self) -> list[Any]:
        tied = ("tokens", nn.Embedding, VOCAB_SIZE, HIDDEN)
        blocks = [LayerSpec(Block, HIDDEN) for _ in range(BLOCKS)]
        head = [LayerSpec(nn.LayerNorm, HIDDEN), TiedLayerSpec(*tied, forward_fn=scores)]
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
    """In a rank: two steps.

    Returns:
        The most bytes that the passes of the second one hold beside parameters and gradients; parameters of the rank.
    """
    from determined.pytorch import Batch

    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = PipedTrial(context)
        Trainer(trial, context).fit(max_length=Batch(2), checkpoint_policy="none")
        own = sum(each.numel() for each in trial.engine.module.parameters())
    return trial.peak_bytes - 4 * own, own
