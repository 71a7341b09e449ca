"""The sizes of a model that decide the memory of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.layers import LayerShape
from determined_ds.memory.units import format_count

DEFAULT_VOCAB_SIZE = 50257  # GPT-2's tokenizer
DEFAULT_SEQUENCE_LENGTH = 1024

# (parameters, layers, hidden size) of published transformers; a model of which only the size is known is assumed
# to be as deep as the nearest. Source: table 2.1 of the GPT-3 paper, arXiv 2005.14165, and OPT's 66B, arXiv 2205.01068.
PUBLISHED = (
    (125e6, 12, 768),
    (350e6, 24, 1024),
    (760e6, 24, 1536),
    (1.3e9, 24, 2048),
    (2.7e9, 32, 2560),
    (6.7e9, 32, 4096),
    (13e9, 40, 5120),
    (66e9, 64, 9216),
    (175e9, 96, 12288),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredActivations:
    """What a forward and a backward pass held beside the parameters and their gradients.

    Args:
        bytes_per_sample: Bytes that each further sample of a micro-batch takes at the peak.
        fixed_bytes: Bytes at the peak that do not depend on the micro-batch.
        element_bytes: Width of the model's floats in that pass: 2 or 4.
        is_checkpointed: Whether the model computed its blocks again in that pass, so that these are the bytes left.
    """

    bytes_per_sample: int
    fixed_bytes: int = 0
    element_bytes: int = 2
    is_checkpointed: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model. Of a shape only ``num_parameters`` must be known; 0 elsewhere means unknown.

    Args:
        num_parameters: All of them, a shared one counted once.
        num_trainable_parameters: Those with a gradient; all of them, if None.
        num_layers: Transformer blocks.
        hidden_size: Width of the residual stream.
        num_heads: Attention heads; they divide ``hidden_size``.
        vocab_size: Width of the logits; 0 for a model without a vocabulary.
        sequence_length: Tokens of a sample.
        largest_layer_parameters: Parameters of the largest module that owns any itself, such as an embedding:
            what ZeRO 3 holds whole at least.
        stage_parameters: Parameters of each pipeline stage, where they were counted in its engines.
        layers: Of a pipeline, where they are known one by one.
        layer_element_bytes: Width of their floats as they were measured: 2 or 4.
        partition_method: How a ``PipelineTrial`` shares them out.
        num_expert_parameters: Those of a mixture of experts' experts, which expert parallel divides.
        checkpoint_interval: Layers that a ``PipelineTrial`` has DeepSpeed compute again together; 0: none.
        activations: Measured on the model; estimated from the sizes above, if None.
        assumptions: Sizes that were assumed, in words.
    """

    num_parameters: int
    num_trainable_parameters: int | None = None
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    vocab_size: int = 0
    sequence_length: int = 0
    largest_layer_parameters: int = 0
    stage_parameters: tuple[int, ...] = ()
    layers: tuple[LayerShape, ...] = ()
    layer_element_bytes: int = 2
    partition_method: str = "parameters"
    num_expert_parameters: int = 0
    checkpoint_interval: int = 0
    activations: MeasuredActivations | None = None
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        assert self.num_parameters >= 1, self
        assert 0 <= self.trainable <= self.num_parameters, self

    @property
    def trainable(self) -> int:
        """Parameters that have a gradient and an optimizer state."""
        known = self.num_trainable_parameters
        return self.num_parameters if known is None else known

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer: as stated, else from the sizes, else all of them."""
        if self.largest_layer_parameters:
            return min(self.largest_layer_parameters, self.num_parameters)
        if self.hidden_size:
            largest = self.hidden_size * max(self.vocab_size, 4 * self.hidden_size + 4)
            return min(largest, self.num_parameters)
        return self.num_parameters

    def at_sequence_length(self, sequence_length: int) -> ModelShape:
        """The same model trained on samples of another length; measured activations scale with it."""
        measured = self.activations
        if measured is not None and self.sequence_length:
            longer = measured.bytes_per_sample * sequence_length // self.sequence_length
            measured = replace(measured, bytes_per_sample=max(1, longer))
        layers = self.layers
        if self.sequence_length:
            layers = tuple(layer.longer(sequence_length, self.sequence_length) for layer in layers)
        return replace(self, sequence_length=sequence_length, activations=measured, layers=layers)


def transformer_parameters(
    *, num_layers: int, hidden_size: int, vocab_size: int = 0, num_positions: int = 0
) -> int:
    """Parameters of a GPT-2: blocks of 12 h² + 13 h, embeddings of tokens and positions, a final norm; head tied.

    Source: ``GPT2LMHeadModel`` of transformers 5; Megatron-LM, arXiv 2104.04473, equation 2, has the same terms.
    """
    block = 12 * hidden_size**2 + 13 * hidden_size
    return num_layers * block + (vocab_size + num_positions) * hidden_size + 2 * hidden_size


def shape_from_sizes(
    *,
    num_parameters: int | None = None,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    vocab_size: int | None = None,
    sequence_length: int | None = None,
) -> ModelShape:
    """A transformer of which some sizes are known; the others are derived, and listed as assumptions.

    Args:
        num_parameters: Derived from layers and width, if None.
        num_layers: Derived from ``num_parameters``, if None.
        hidden_size: Derived from ``num_parameters``, if None.
        num_heads: As many as make heads of 64, or of 128 from a width of 2048 on, if None.
        vocab_size: GPT-2's, if None.
        sequence_length: 1024, if None.

    Raises:
        ConfigError: too little is known, or the sizes do not fit together; every reason.
    """
    problems = _size_problems(num_parameters, num_layers, hidden_size, num_heads)
    if problems:
        raise ConfigError(problems)
    assumptions = []
    vocab = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    length = DEFAULT_SEQUENCE_LENGTH if sequence_length is None else sequence_length
    if vocab_size is None:
        assumptions.append(f"a vocabulary of {vocab:,} (GPT-2's; --vocab)")
    if sequence_length is None:
        assumptions.append(f"samples of {length:,} tokens (--sequence-length)")
    layers, hidden = _depth_and_width(num_parameters, num_layers, hidden_size, vocab)
    if num_parameters is not None and (num_layers is None or hidden_size is None):
        contradiction = _too_few(num_parameters, layers, hidden, num_layers, hidden_size)
        if contradiction:
            raise ConfigError(contradiction)
    if num_layers is None or hidden_size is None:
        plural = "" if layers == 1 else "s"
        assumptions.append(f"{layers:,} layer{plural} of width {hidden:,} (--layers, --hidden)")
    if num_parameters is None:
        num_parameters = transformer_parameters(
            num_layers=layers, hidden_size=hidden, vocab_size=vocab, num_positions=length
        )
        assumptions.append(
            f"{format_count(num_parameters)} parameters, as a GPT-2 of these sizes has (--params)"
        )
    return ModelShape(
        num_parameters=num_parameters,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=num_heads or _plausible_heads(hidden),
        vocab_size=vocab,
        sequence_length=length,
        assumptions=tuple(assumptions),
    )


def _size_problems(
    num_parameters: int | None, num_layers: int | None, hidden_size: int | None, num_heads: int | None
) -> list[Problem]:
    problems = []
    missing = [flag for flag, value in (("--layers", num_layers), ("--hidden", hidden_size)) if value is None]
    if num_parameters is None and missing:
        message = (
            f"missing, as {'are' if missing[1:] else 'is'} {' and '.join(missing)}: the model has no size"
        )
        fix = "write e.g. --params 6B, or --layers 32 --hidden 4096"
        problems.append(Problem(key="--params", message=message, fix=fix, code="model-size"))
    if hidden_size is not None and num_heads is not None and hidden_size % num_heads:
        near = " or ".join(map(str, _nearest_divisors(hidden_size, num_heads)))
        message = f"must be divisible by {num_heads} heads"
        fix = f"use --heads {near}, or --hidden {round_up(hidden_size, num_heads)}"
        problems.append(Problem(key="--hidden", value=hidden_size, message=message, fix=fix, code="heads"))
    if num_parameters is not None and num_layers is not None and hidden_size is not None:
        blocks = 12 * num_layers * hidden_size**2
        # Grouped queries and a narrow feed-forward halve a block; experts multiply it.
        if num_parameters < blocks // 4:
            message = f"{num_layers} layers of width {hidden_size} alone have about {format_count(blocks)}"
            fix = f"use --params {format_count(blocks)}, or fewer --layers, or leave one of the three out"
            code = "model-size"
            problems.append(
                Problem(key="--params", value=num_parameters, message=message, fix=fix, code=code)
            )
    return problems


def _too_few(
    num_parameters: int, layers: int, hidden: int, num_layers: int | None, hidden_size: int | None
) -> Problem | None:
    """The problem of fewer parameters than a transformer of that depth or width has."""
    blocks = 12 * layers * hidden**2
    if num_parameters >= blocks // 4:
        return None
    number = format_count(num_parameters)
    if num_layers is None and hidden_size is None:
        message, fix = "are too few for a transformer", f"write {number}B or {number}M if that is meant"
    else:
        stated = f"--layers {num_layers}" if hidden_size is None else f"--hidden {hidden_size}"
        message = f"are too few for {stated}: {layers:,} layers of width {hidden:,} have about {format_count(blocks)}"
        fix = f"use more --params, or a smaller {stated.split()[0]}"
    return Problem(key="--params", value=num_parameters, message=message, fix=fix, code="model-size")


def _nearest_divisors(number: int, to: int) -> list[int]:
    below = next(candidate for candidate in range(min(to, number), 0, -1) if number % candidate == 0)
    above = (
        next(candidate for candidate in range(max(to, 1), number + 1) if number % candidate == 0)
        if to <= number
        else number
    )
    return sorted({below, above})


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def _depth_and_width(
    num_parameters: int | None, num_layers: int | None, hidden_size: int | None, vocab_size: int
) -> tuple[int, int]:
    if num_layers is not None and hidden_size is not None:
        return num_layers, hidden_size
    assert num_parameters is not None
    if hidden_size is not None:
        in_blocks = num_parameters - vocab_size * hidden_size
        return max(1, round(in_blocks / (12 * hidden_size**2))), hidden_size
    if num_layers is None:
        nearest = min(PUBLISHED, key=lambda row: abs(math.log(row[0] / num_parameters)))
        # Below the smallest, depth shrinks with width.
        smaller = min(1.0, num_parameters / PUBLISHED[0][0])
        num_layers = max(1, round(nearest[1] * smaller ** (1 / 3)))
    # 12 L h² + V h = P, solved for h.
    a, b = 12 * num_layers, vocab_size
    width = (math.sqrt(b * b + 4 * a * num_parameters) - b) / (2 * a)
    step = 128 if width >= 512 else 8
    return num_layers, max(step, round(width / step) * step)


def _plausible_heads(hidden_size: int) -> int:
    head = 128 if hidden_size >= 2048 else 64
    return next(heads for heads in range(max(1, hidden_size // head), 0, -1) if hidden_size % heads == 0)
