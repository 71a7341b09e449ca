"""The transformers that are measured, by their sizes: ``6x384`` is six layers of a width of 384. Loads no torch."""

from __future__ import annotations

import re

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.model import ModelShape, transformer_parameters

# Vocabulary and tokens of a sample: of bytes on a CPU, of GPT-2 on a GPU.
TEXTS = {"cpu": (256, 128), "cuda": (50257, 1024)}
HEAD = 64  # width of a head
OPTION = "--models"


def shape_named(name: str, accelerator: str) -> ModelShape:
    """The sizes of a model.

    Args:
        name: ``LAYERSxWIDTH``; the width is a multiple of 64.
        accelerator: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the name is not of that form.
    """
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,5})", name)
    if found is None or int(found[2]) % HEAD:
        message = f"must be LAYERSxWIDTH, with a width that is a multiple of {HEAD}"
        raise ConfigError(Problem(key=OPTION, value=name, message=message, fix="e.g. 6x384", code="model"))
    layers, width = int(found[1]), int(found[2])
    vocab_size, tokens = TEXTS[accelerator]
    return ModelShape(
        num_parameters=transformer_parameters(
            num_layers=layers, hidden_size=width, vocab_size=vocab_size, num_positions=tokens
        ),
        num_layers=layers,
        hidden_size=width,
        vocab_size=vocab_size,
        num_heads=width // HEAD,
        sequence_length=tokens,
    )


def step_flops(shape: ModelShape) -> float:
    """Floating-point operations of a sample, forward and backward, which is twice the forward pass.

    A product of a matrix and a vector is 2 operations an element: 12 h² elements a layer, v h of the head; attention
    is 4 t h a token and layer, its mask not counted off. Source: arXiv 2205.05198, appendix A, and arXiv 2204.02311,
    appendix B.

    Args:
        shape: From :func:`shape_named`.
    """
    tokens, width = shape.sequence_length, shape.hidden_size
    products = 2 * (12 * width**2 * shape.num_layers + shape.vocab_size * width)
    return 3.0 * tokens * (products + 4 * tokens * width * shape.num_layers)
