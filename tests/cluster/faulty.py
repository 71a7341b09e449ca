"""GPT-2 with a fault that ``FAULT`` names as ``KIND:BATCH``; sent into a context directory beside the project."""

import os
from typing import Any

import torch

from model_defs.gpt2.trial import GPT2Trial

KIND, _, BATCH = os.environ.get("FAULT", ":0").partition(":")


class Faulty(GPT2Trial):
    """Rank 1 runs out of memory with micro-batches above two samples, or a loss that is taken back."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        context, loss = self.context, super().loss(model, batch)
        if not torch.is_grad_enabled() or context._current_batch_idx + 1 != int(BATCH):
            return loss
        if KIND == "oom" and context.distributed.rank == 1 and self.resolved.batch.micro_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss * (5000 if KIND == "spike" and not context.faults.all else 1)
