"""Random-number generators: seeded alike, saved and restored; in data-loader workers, seeded for each micro-batch.

Workers run ahead of training, so no checkpoint can hold their generators. Each micro-batch is therefore made under a
seed that depends on its number alone, and a resumed run draws what an uninterrupted one would. Without workers,
samples are drawn from the rank's own generators, which a checkpoint holds.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

SEED = "seed"  # in the state of generators: they begin anew with it


def mixed_seed(*numbers: int) -> int:
    """One seed from several integers, the same in every process: the hash of integers is not randomized."""
    return hash(numbers) % 2**32


def seed_everything(seed: int, *, cpu_only: bool = False) -> None:
    """Seed random, numpy and torch, the same on every rank; ``cpu_only`` leaves the generators of GPUs alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    (torch.random.default_generator.manual_seed if cpu_only else torch.manual_seed)(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, in types that can be read back without executing anything."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "random_rng_state": random.getstate(),
    }
    if device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator that ``state`` holds; the names are those of Determined's own checkpoints."""
    if SEED in state:
        seed_everything(state[SEED])
    if "cpu_rng_state" in state:
        torch.random.set_rng_state(state["cpu_rng_state"])
    if "np_rng_state" in state:
        name, keys, *rest = state["np_rng_state"]
        np.random.set_state((name, np.asarray(keys).astype(np.uint32), *rest))
    if "random_rng_state" in state:
        random.setstate(state["random_rng_state"])
    if device.type == "cuda" and "gpu_rng_state" in state:
        torch.cuda.set_rng_state(state["gpu_rng_state"], device)
