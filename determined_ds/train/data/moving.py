"""Batches moved to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Mover:
    """Moves batches to a device, as ``determined.pytorch.to_device`` does; named tuples stay named tuples."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # From pinned memory the host does not wait for the copy; later work of the device comes after it anyway.
        self._in_background = device.type == "cuda"

    def move(self, data: Any) -> Any:
        """A batch with all of its tensors and arrays on the device; everything else is unchanged."""
        if isinstance(data, torch.Tensor):
            return data.to(self._device, non_blocking=self._in_background)
        if isinstance(data, dict):
            return {key: self.move(value) for key, value in data.items()}
        # A packed sequence is a named tuple too, but its batch sizes stay on the host: it moves itself.
        if isinstance(data, (list, tuple)) and not hasattr(data, "to"):
            values = [self.move(value) for value in data]
            if isinstance(data, tuple):
                return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
            return values
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":  # the kinds of types that torch has
            return torch.from_numpy(data).to(self._device, non_blocking=self._in_background)
        return data.to(self._device) if callable(getattr(data, "to", None)) else data
