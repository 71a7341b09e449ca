"""DeepSpeed's instruments, which ``fit.breakdown`` switches on: what the loop then reports, it reads from them.

A JSON without them, or with ``false``, which is DeepSpeed's own default and stands in most JSONs, has them switched on.
What a JSON switches on itself is printed by DeepSpeed as ever, and reported as well. Only ``false`` in
``overwrite_deepspeed_args``, beside ``fit.breakdown`` in the same experiment, contradicts it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.errors import Problem

BREAKDOWN: KeyPath = ("fit", "breakdown")
# The key of the JSON that switches each on.
INSTRUMENTS: dict[str, KeyPath] = {
    "comms_logger": ("comms_logger", "enabled"),
    "memory_breakdown": ("memory_breakdown",),
    "wall_clock_breakdown": ("wall_clock_breakdown",),
}


def switched_on(ds: Document, hyperparameters: Document) -> frozenset[str]:
    """The instruments that ``fit.breakdown`` switches on: all that a DeepSpeed JSON does not."""
    if hyperparameters.get(BREAKDOWN) is not True:
        return frozenset()
    return frozenset(name for name, path in INSTRUMENTS.items() if not ds.get(path))


def switch_on(ds: Document, hyperparameters: Document) -> Document:
    """A DeepSpeed JSON with these on."""
    names = switched_on(ds, hyperparameters)
    if not names:
        return ds
    origin = hyperparameters.origin(BREAKDOWN)
    origin = origin.reworded(f"{dotted(BREAKDOWN)}, {origin}")
    return ds.overwritten_all((INSTRUMENTS[name], True, origin) for name in sorted(names))


def without_instruments(ds_config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What DeepSpeed is given before the loop switches them on: it would print while it is initialized."""
    return {key: value for key, value in ds_config.items() if key not in names}


def contradicting(hyperparameters: Document, overwrites: str) -> Iterator[Problem]:
    """A problem for each instrument that ``fit.breakdown`` switches on, and ``overwrites`` off."""
    for path in INSTRUMENTS.values() if hyperparameters.get(BREAKDOWN) is True else ():
        over: KeyPath = (overwrites, *path)
        if hyperparameters.get(over) is False:
            message = f"differs from {dotted(over)} = false ({hyperparameters.origin(over)})"
            fix = f"keep one of them: breakdown switches {path[0]} on"
            yield hyperparameters.problem(BREAKDOWN, message, fix, "stated-twice")
