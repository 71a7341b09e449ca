"""Which parameters DeepSpeed's Muon steps, and which its Adam.

Muon is made for the matrices within a model; embeddings, heads and vectors are Adam's (Keller Jordan's Muon, in
deepspeed 0.19.8's ``runtime/zero/muon/original_muon.py``). DeepSpeed goes by names: ``embed`` and ``lm_head`` are
Adam's, and so GPT-2's ``wte`` and ``wpe`` are not. Here embeddings go by their class and heads by what the model says,
and a parameter's own ``use_muon``, set before, decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch

MUON, FLAG = "muon", "use_muon"
EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Around ``deepspeed.initialize``, which tags the parameters, and again those that AutoEP makes.

    Source: ``set_optimizer_flags`` in deepspeed 0.19.8's ``__init__.py``.
    """
    own = deepspeed.set_optimizer_flags

    def tag(config: Any, model: torch.nn.Module) -> None:
        stated = [(each, getattr(each, FLAG)) for each in model.parameters() if hasattr(each, FLAG)]
        own(config, model)
        if config.optimizer_name != MUON:
            return
        for module in model.modules():  # whole, or the layers of a pipeline's stage
            get_head = getattr(module, "get_output_embeddings", None)  # of a model of transformers
            head = get_head() if callable(get_head) else None
            left = [*module.parameters(recurse=False)] if isinstance(module, EMBEDDINGS) else []
            for parameter in (*left, *(head.parameters() if isinstance(head, torch.nn.Module) else ())):
                setattr(parameter, FLAG, False)
        for parameter, value in stated:
            setattr(parameter, FLAG, value)

    deepspeed.set_optimizer_flags = tag
    try:
        yield
    finally:
        deepspeed.set_optimizer_flags = own
