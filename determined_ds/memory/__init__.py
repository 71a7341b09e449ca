"""Bytes that training will take: pure arithmetic over the sizes of a model and a strategy.

Names are resolved when they are used: to format a size loads no estimate.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Fit": "determined_ds.memory.fitting",
    "MeasuredActivations": "determined_ds.memory.model_shape",
    "Memory": "determined_ds.memory.estimate",
    "ModelShape": "determined_ds.memory.model_shape",
    "alternatives": "determined_ds.memory.fitting",
    "fit": "determined_ds.memory.fitting",
    "fits": "determined_ds.memory.fitting",
    "format_bytes": "determined_ds.memory.units",
    "format_count": "determined_ds.memory.units",
    "largest_micro_batch": "determined_ds.memory.fitting",
    "memory_per_rank": "determined_ds.memory.estimate",
    "parse_bytes": "determined_ds.memory.units",
    "parse_count": "determined_ds.memory.units",
    "shape_from_sizes": "determined_ds.memory.model_shape",
    "transformer_parameters": "determined_ds.memory.model_shape",
    "usable_bytes": "determined_ds.memory.fitting",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
