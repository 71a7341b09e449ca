"""Random-number generators: seeded alike, saved and brought back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch alike, the same on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, of types that can be read back safely."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    state: dict[str, Any] = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "random_rng_state": random.getstate(),
    }
    if device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator that ``state`` has; Determined's own checkpoints have them under the same names."""
    if "cpu_rng_state" in state:
        torch.random.set_rng_state(state["cpu_rng_state"])
    if "np_rng_state" in state:
        name, keys, position, has_gauss, cached = state["np_rng_state"]
        np.random.set_state((name, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    if "random_rng_state" in state:
        random.setstate(state["random_rng_state"])
    if device.type == "cuda" and "gpu_rng_state" in state:
        torch.cuda.set_rng_state(state["gpu_rng_state"], device)
