"""What is counted in a model that is built on torch's meta device: exact, and no memory taken."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from determined_ds.memory.model_shape import ModelShape


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings that building on the meta device brings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of initial values that a meta tensor does not take
        yield


def shape_of_built(model: Any, config: Any, *, sequence_length: int, **known: Any) -> ModelShape:
    """The shape of a model that is built, counted in its modules and read in its configuration.

    Args:
        model: A ``torch.nn.Module``, on any device.
        config: Of a Hugging Face model, or anything that has sizes by the same names; None where there is nothing.
        sequence_length: Tokens of a sample; 0 where a sample is none of a text.
        known: What else is known of the shape.
    """
    parameters = list(model.parameters())

    def size(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), 0)

    owned = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return ModelShape(
        num_parameters=max(1, sum(p.numel() for p in parameters)),
        num_trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        num_layers=size("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_heads=size("num_attention_heads", "n_head", "num_heads"),
        vocab_size=size("vocab_size"),
        sequence_length=sequence_length,
        largest_layer_parameters=max(owned, default=0),
        **known,
    )
