"""Batches moved to a device."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from determined_ds.trial.author import described

logger = logging.getLogger("determined_ds")


class Mover:
    """Moves batches to a device, as ``determined.pytorch.to_device`` does; named tuples stay named tuples."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # From pinned memory the host does not wait for the copy; later work of the device comes after it anyway.
        self._in_background = device.type == "cuda"
        self._known: set[type] = {int, float, complex, bool, type(None)}  # numbers are on every device

    def move(self, data: Any) -> Any:
        """A batch with all of its tensors and arrays on the device; everything else is unchanged, with a warning."""
        if isinstance(data, torch.Tensor):
            return data.to(self._device, non_blocking=self._in_background)
        if isinstance(data, dict):
            return {key: self.move(value) for key, value in data.items()}
        if isinstance(data, list):
            return [self.move(value) for value in data]
        # A packed sequence is a named tuple too, but its batch sizes stay on the host: it moves itself, below.
        if isinstance(data, tuple) and not isinstance(data, torch.nn.utils.rnn.PackedSequence):
            values = (self.move(value) for value in data)
            return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":  # the kinds of types that torch has
            return torch.from_numpy(data).to(self._device, non_blocking=self._in_background)
        if callable(getattr(data, "to", None)):
            return data.to(self._device)
        if type(data) not in self._known:
            self._known.add(type(data))
            logger.warning(
                "warning: a batch holds %s, which cannot be moved to a device and is left unchanged. Leave it out of "
                "the batch (collate_fn) where the model needs it on %s, or give its class a method to(device).",
                *(described(data), self._device),
            )
        return data
