"""Parameters: the generator that draws each one, and their groups for the optimizer."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


def seed_of(seed: int, name: str) -> int:
    """A seed of its own for a part of the model, of 56 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")


def generator_of(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU that the seed and a parameter's name decide, whatever was drawn before."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def decay_groups(model: nn.Module, no_decay: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Optimizer groups of the trained parameters: matrices decay; biases and norms, which are vectors, do not.

    Args:
        model: Whole, or partitioned by ZeRO 3.
        no_decay: Parts of the names of matrices that do not decay either.
    """
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Under ZeRO 3 every parameter is a vector; its real shape is beside it.
            is_vector = len(getattr(parameter, "ds_shape", parameter.shape)) < 2
            groups[is_vector or any(part in name for part in no_decay)]["params"].append(parameter)
    return [group for group in groups if group["params"]]
