"""Images to learn from: scikit-learn's handwritten digits, or those of any folder.

Legend of shape suffixes: C colours, H height and W width in pixels, Z latent numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from model_defs.common.images import find_images, handwritten_digits, opened
from model_defs.common.sections import Section, parse_section

DIGITS_EVERY = 5  # each fifth digit is for validation


class DataConfig(Section, extra="forbid"):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """Folder of images, at any depth; None: scikit-learn's handwritten digits."""
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    """About this part of a folder's images is for validation, where it has no ``train`` and ``val``."""
    num_workers: int = Field(0, ge=0)
    """Processes a rank that read ahead."""


class Images(Dataset[Tensor]):
    """Item ``i`` is image_CHW, float32 in [-1, 1]: the shorter side scaled to the size, and the middle cut out.

    Args:
        images: Each one, or its file, which is read in colour.
        image_size: Height and width, in pixels.
    """

    def __init__(self, images: Sequence[Image.Image | Path], image_size: int) -> None:
        self.images = images
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        image, size = self.images[index], (self.image_size, self.image_size)
        if isinstance(image, Path):
            with opened(image) as found:
                image = found.convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        box = (left, top, left + side, top + side)
        pixels = np.array(image.resize(size, Image.Resampling.BILINEAR, box=box)).reshape(*size, -1)
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1


class WithLatents(Dataset[tuple[Tensor, Tensor]]):
    """Item ``i`` is ``(image_CHW, latents_Z)``: a real image, and the latents of a generated one.

    The latents are decided by (seed, i), so every validation generates the same ones, whichever rank it is on.
    """

    def __init__(self, images: Images, latent_size: int, seed: int) -> None:
        self.images = images
        self.latent_size = latent_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([self.seed, index])
        latents_Z = generator.standard_normal(self.latent_size, dtype=np.float32)
        return self.images[index], torch.from_numpy(latents_Z)


class ImageData(NamedTuple):
    """Images, ready to train on: of C colours, for data loaders with so many workers."""

    train: Images
    validation: Images
    num_colours: int
    num_workers: int


def load_images(data: Mapping[str, Any] | None, *, image_size: int) -> ImageData:
    """Open what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        image_size: Height and width that images are scaled to, in pixels.

    Raises:
        ConfigError: Unknown keys or values of the wrong type, all of them.
        DataError: The folder holds too few images.
    """
    config = parse_section(DataConfig, data, section="data")
    sides: tuple[list[Any], list[Any]] = ([], [])
    if config.path is None:
        for index, image in enumerate(handwritten_digits()[0]):
            sides[index % DIGITS_EVERY == 0].append(image)
    else:
        for side, found in zip(sides, find_images(config.path, config.validation_fraction), strict=True):
            side += [file for _, file in found]
    train, validation = (Images(side, image_size) for side in sides)
    return ImageData(train, validation, 1 if config.path is None else 3, config.num_workers)
