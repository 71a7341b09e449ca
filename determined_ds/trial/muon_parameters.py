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
        for parameter in embeddings_and_heads(model):
            setattr(parameter, FLAG, False)
        for parameter, value in stated:
            setattr(parameter, FLAG, value)

    deepspeed.set_optimizer_flags = tag
    try:
        yield
    finally:
        deepspeed.set_optimizer_flags = own


def embeddings_and_heads(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of embeddings, and of the heads that models of transformers name.

    Args:
        model: Whole, or the layers of a pipeline's stage.
    """
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            yield from module.parameters(recurse=False)
        head = getattr(module, "get_output_embeddings", None)
        found = head() if callable(head) else None
        if isinstance(found, torch.nn.Module):
            yield from found.parameters()
