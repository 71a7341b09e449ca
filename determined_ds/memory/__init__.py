"""Bytes that training will take: pure arithmetic over the sizes of a model and a strategy."""

from determined_ds.memory.estimate import Memory, memory_per_rank
from determined_ds.memory.fitting import (
    Fit,
    alternatives,
    fit,
    fits,
    largest_micro_batch,
    usable_bytes,
)
from determined_ds.memory.model_shape import (
    MeasuredActivations,
    ModelShape,
    shape_from_sizes,
    transformer_parameters,
)
from determined_ds.memory.units import format_bytes, format_count, parse_bytes, parse_count

__all__ = [
    "Fit",
    "MeasuredActivations",
    "Memory",
    "ModelShape",
    "alternatives",
    "fit",
    "fits",
    "format_bytes",
    "format_count",
    "largest_micro_batch",
    "memory_per_rank",
    "parse_bytes",
    "parse_count",
    "shape_from_sizes",
    "transformer_parameters",
    "usable_bytes",
]
