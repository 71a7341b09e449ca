"""Batches moved to a device; a warning names the place in the batch of what cannot be moved."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from determined_ds.trial.author import described

logger = logging.getLogger("determined_ds")

# Kinds of numpy's types that torch has: floats, complex numbers, integers and booleans.
KINDS = "fciub"


class Mover:
    """Moves batches to a device, as ``determined.pytorch.to_device`` does; named tuples stay named tuples.

    Source: ``to_device`` in determined 0.38.1's ``pytorch/_data.py``, whose warning names the type alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # From pinned memory the host does not wait for the copy; later work of the device comes after it anyway.
        self._in_background = device.type == "cuda"
        self._known: set[type] = {int, float, complex, bool, type(None)}  # numbers are on every device

    def move(self, batch: Any) -> Any:
        """A batch with all of its tensors and arrays on the device; everything else is unchanged."""
        strangers: set[type] = set()
        moved = self._moved(batch, strangers)
        if strangers:
            self._known |= strangers
            self._warn(batch, strangers)
        return moved

    def _moved(self, data: Any, strangers: set[type]) -> Any:
        if isinstance(data, torch.Tensor):
            return data.to(self._device, non_blocking=self._in_background)
        if isinstance(data, dict):
            return {key: self._moved(value, strangers) for key, value in data.items()}
        if isinstance(data, list):
            return [self._moved(value, strangers) for value in data]
        # A packed sequence is a named tuple too, but its batch sizes stay on the host: it moves itself, below.
        if isinstance(data, tuple) and not isinstance(data, torch.nn.utils.rnn.PackedSequence):
            values = (self._moved(value, strangers) for value in data)
            return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
        if isinstance(data, np.ndarray) and data.dtype.kind in KINDS:
            return torch.from_numpy(data).to(self._device, non_blocking=self._in_background)
        if callable(getattr(data, "to", None)):
            return data.to(self._device)
        if type(data) not in self._known:
            strangers.add(type(data))
        return data

    def _warn(self, batch: Any, strangers: set[type]) -> None:
        for place, value in _leaves(batch, "batch"):
            if type(value) in strangers:
                strangers.remove(type(value))
                kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else described(value)
                logger.warning(
                    "warning: %s is %s, which cannot be moved to a device and is left unchanged. Leave it out of the "
                    "batch (collate_fn) where the model needs it on %s, or give its class a method to(device).",
                    *(place, kind, self._device),
                )


def _leaves(data: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The places of a batch and what is there, such as ``batch['labels'][0]``."""
    if isinstance(data, (dict, list, tuple)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, f"{place}[{key!r}]")
    else:
        yield place, data
