"""The split into training and validation: by a hash of each sample's name, the same on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from model_defs.common.sections import data_error

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


def check_apart(path: str | None, validation_path: str | None) -> None:
    """Refuse a ``data.validation_path`` within ``data.path``, or the other way round."""
    if path is not None and validation_path is not None:
        train, validation = (Path(each).expanduser().resolve() for each in (path, validation_path))
        if train.is_relative_to(validation) or validation.is_relative_to(train):
            message = f"overlaps data.path = {path!r}: validation data would be trained on."
            fix = "separate the two paths; or data.validation_path: null, which splits data.path"
            raise data_error("data.validation_path", validation_path, message, fix)
