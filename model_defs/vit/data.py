"""Images for ViT: files, or handwritten digits -> tensors for training and for validation.

Legend of shape suffixes: C channels, H height, W width.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset
from transformers.utils.hub import cached_file

from model_defs.common.files import split
from model_defs.common.images import KEY, find_images, handwritten_digits, opened
from model_defs.common.sections import Section, data_error, parse_section

Labelled = tuple[Image.Image | Path, int]


class DataConfig(Section, extra="forbid"):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """Folder of images, one folder a class, or ``train`` and ``val`` with such folders; None: handwritten digits."""
    validation_fraction: float = Field(0.2, gt=0, lt=1)
    """About this part of the images is for validation, where the folder has no ``train`` and ``val``."""
    num_workers: int = Field(0, ge=0)
    """Processes of each rank that read images; 0: the rank itself."""


class Augmentation(NamedTuple):
    """How training images are varied: the least share of the area that a crop keeps; and mirrored, or not."""

    crop_scale: float
    horizontal_flip: bool


# Crops as torchvision and timm make them are for a hundred epochs and more; a fine-tuning is shorter.
PHOTOGRAPHS = Augmentation(crop_scale=0.3, horizontal_flip=True)
# A digit that is cut in half, or mirrored, is another one.
DIGITS = Augmentation(crop_scale=0.7, horizontal_flip=False)


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel of pixels in [0, 1]; those of ViT's own image processor."""

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


class Images(Dataset[tuple[Tensor, int]]):
    """``(pixels_CHW, label)`` of each image.

    Variations are drawn from Python's own generator: the library seeds it, so that a resumed run draws what a whole
    one would, with any number of workers.

    Args:
        images: Each one, or its file; and its label, from 0.
        image_size: Height and width, in pixels.
        normalization: Of the pixels.
        augmentation: None: images are not varied.
    """

    def __init__(
        self,
        images: Sequence[Labelled],
        image_size: int,
        normalization: Normalization,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.images = images
        self.image_size = image_size
        self.normalization = normalization
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        with opened(image) if isinstance(image, Path) else nullcontext(image) as found:
            image = found.convert("RGB")
        box = None
        if self.augmentation:
            # A crop of the image's own proportions, anywhere in it.
            part = math.sqrt(random.uniform(self.augmentation.crop_scale, 1))
            wide, high = part * image.width, part * image.height
            left, upper = random.uniform(0, image.width - wide), random.uniform(0, image.height - high)
            box = (left, upper, left + wide, upper + high)
        # To the square at once, as ViTImageProcessor does, so that nothing else is cut off.
        side = (self.image_size, self.image_size)
        image = image.resize(side, Image.Resampling.BILINEAR, box=box)
        if self.augmentation and self.augmentation.horizontal_flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        mean_C, std_C = (np.array(values, np.float32) for values in self.normalization)
        pixels_HWC = (np.asarray(image, np.float32) / 255 - mean_C) / std_C
        return torch.from_numpy(pixels_HWC).permute(2, 0, 1), label


class ImageData(NamedTuple):
    """Images and their labels, the names of the classes by label, and how training images are varied."""

    train: Sequence[Labelled]
    validation: Sequence[Labelled]
    classes: list[str]
    augmentation: Augmentation
    num_workers: int


def load_images(data: Mapping[str, Any] | None) -> ImageData:
    """Find the images that the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.

    Raises:
        ConfigError: Unknown keys or values of the wrong type in ``data``, all of them.
        DataError: There are fewer than two classes, or an image is of none of them.
    """
    config = parse_section(DataConfig, data, section="data")
    fraction = config.validation_fraction
    if config.path is None:
        digits: list[Labelled] = list(zip(*handwritten_digits(), strict=True))
        train, validation = split(range(len(digits)), fraction, by=lambda i: f"digit {i}")
        sides = [[digits[i] for i in side] for side in (train, validation)]
        classes, augmentation = [str(digit) for digit in range(10)], DIGITS
    else:
        found = find_images(config.path, fraction)
        # The class is the first folder of an image's name.
        classes = sorted({name.split("/")[0] for name, _ in found[0] if "/" in name})
        numbers = {name: number for number, name in enumerate(classes)}
        fix = "<class>/*.jpg with two classes or more; or train/<class>/ and val/<class>/ of the same classes"
        for name, file in found[0] + found[1]:
            if name.split("/")[0] not in numbers:
                raise data_error(KEY, str(file), f"is of none of the classes {', '.join(classes[:10])}.", fix)
        if len(classes) < 2:
            raise data_error(KEY, config.path, f"there is one class, {classes[0]}.", fix)
        sides = [[(file, numbers[name.split("/")[0]]) for name, file in side] for side in found]
        augmentation = PHOTOGRAPHS
    return ImageData(sides[0], sides[1], classes, augmentation, config.num_workers)


def normalization_of(source: str | None) -> Normalization:
    """That of a checkpoint's image processor, or else ViT's own."""
    processor: dict[str, Any] = {}
    if source is not None:
        file = cached_file(source, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
        processor = json.loads(Path(file).read_bytes()) if file else {}
    given = {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
    return Normalization(**{name: tuple(values) for name, values in given.items() if values})
