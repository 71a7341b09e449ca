"""The split into training and validation: by a hash of each sample's name, the same on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from determined_ds.errors import Problem

T = TypeVar("T")


def split(
    samples: Sequence[T], names: Sequence[str], fraction: float, *, seed: int | None = None
) -> tuple[list[T], list[T]]:
    """Samples for training and for validation, each in the order given.

    A sample stays on its side when others are added. Of two or more names each side gets at least one; a single
    name goes to training.

    Args:
        samples: What is split.
        names: The name of each sample; samples of the same name stay together.
        fraction: About this part of the names is for validation, in (0, 1).
        seed: Another split for each seed; None: the split of the name alone.
    """
    places = [_place(name if seed is None else f"{seed}/{name}") for name in names]
    lowest, highest = min(places, default=0.0), max(places, default=0.0)
    # The threshold moves only where one of the sides would be empty.
    threshold = min(max(fraction, math.nextafter(lowest, 2.0)), highest)
    train = [sample for sample, place in zip(samples, places, strict=True) if place >= threshold]
    validation = [sample for sample, place in zip(samples, places, strict=True) if place < threshold]
    return train, validation


def _place(name: str) -> float:
    """A number in [0, 1) that the name decides, uniform over names."""
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def overlap_problems(path: str | None, validation_path: str | None) -> list[Problem]:
    """The problem of ``data.path`` and ``data.validation_path`` where one lies within the other."""
    if path is None or validation_path is None:
        return []
    train, validation = (Path(each).expanduser().resolve() for each in (path, validation_path))
    if train != validation and train not in validation.parents and validation not in train.parents:
        return []
    return [
        Problem(
            key="data.validation_path",
            value=validation_path,
            message=f"overlaps data.path = {path!r}: validation data would be trained on.",
            fix="separate the two paths; or data.validation_path: null, which splits data.path",
        )
    ]
