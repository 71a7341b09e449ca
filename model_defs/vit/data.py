"""Images for ViT: files, or handwritten digits -> tensors for training and for validation.

What a sample becomes is decided by the seed, the epoch and the sample alone: the same on every rank, with any number of
workers, and again on every resume.

Legend of shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers.utils.hub import cached_file

from model_defs.common.images import check_images, handwritten_digits, opened
from model_defs.common.sections import Section, parse_section
from model_defs.common.split import split
from model_defs.vit.augment import Augmentation, Pixels
from model_defs.vit.folders import find_images

# Crops as torchvision and timm make them are for a hundred epochs and more; a fine-tuning is shorter.
PHOTOGRAPHS = Augmentation(crop_scale=0.3, horizontal_flip=True, color_jitter=0.2)
# A digit that is cut in half, or mirrored, is another one.
DIGITS = Augmentation(crop_scale=0.7, horizontal_flip=False, color_jitter=0.1)
# Of ViTImageProcessor: pixels from -1 to 1.
MEAN = STD = (0.5, 0.5, 0.5)


class DataConfig(Section):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """Folder of images, see :mod:`model_defs.vit.folders`; None: scikit-learn's handwritten digits."""
    validation_fraction: float = Field(0.2, gt=0, lt=1)
    """About this part of the images is for validation, where the folder has no split of its own."""
    split_seed: int = Field(0, ge=0)
    """Of that split; apart from the experiment's, so that experiments can be compared."""
    crop_scale: float | None = Field(None, gt=0, le=1)
    """Least share of an image's area that a training crop keeps; None: 0.3, of digits 0.7; 1: almost no crops."""
    horizontal_flip: bool | None = None
    """Mirror every second training image; None: photographs, yes, and digits, no."""
    color_jitter: float | None = Field(None, ge=0, lt=1)
    """Brightness, contrast and saturation of training images vary by this part; None: 0.2, of digits 0.1."""
    num_workers: int = Field(0, ge=0)
    """Processes of each rank that read images; 0: the rank itself."""
    check_images: int = Field(100, ge=0)
    """This many images, evenly spread, are read before training; the others when training needs them."""


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """``(pixels_CHW, label)`` of each image.

    An index beyond the number of images is one of a later epoch: image ``index % len`` in epoch ``index // len``,
    which is what :class:`EpochSampler` yields.

    Args:
        images: Each one, or the path of its file; and its label, from 0.
        pixels: What becomes of it.
        seed: The run's.
    """

    def __init__(self, images: Sequence[tuple[Image.Image | str, int]], pixels: Pixels, seed: int) -> None:
        self.images = images
        self.pixels = pixels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        epoch, sample = divmod(index, len(self))
        generator = np.random.default_rng([self.seed, epoch, sample])
        source, label = self.images[sample]
        if isinstance(source, str):
            with opened(source) as image:
                source = image.convert("RGB")
        return self.pixels(source, generator), label


class EpochSampler(Sampler[int]):
    """All samples in another order each epoch, numbered on and on: sample ``i`` of epoch ``e`` is ``e * len + i``.

    So the dataset knows the epoch, in whatever process it is asked.

    Args:
        num_samples: Of an epoch.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``; the loop says it, with torch's generator seeded for it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        yield from (epoch * self.num_samples + torch.randperm(self.num_samples)).tolist()


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Images, found and yet to become tensors.

    Args:
        train: For training.
        validation: For validation.
        classes: Names of the classes, by label.
        augmentation: Of training images.
        num_workers: Processes that a loader is to have.
        description: One line for the log.
    """

    train: Sequence[tuple[Image.Image | str, int]]
    validation: Sequence[tuple[Image.Image | str, int]]
    classes: list[str]
    augmentation: Augmentation
    num_workers: int
    description: str

    def datasets(
        self, *, image_size: int, seed: int, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
    ) -> tuple[ImageDataset, ImageDataset]:
        """For training and for validation; see :class:`Pixels` and :class:`ImageDataset` for the arguments."""
        train, validation = (
            Pixels(image_size=image_size, mean=mean, std=std, augmentation=augmentation)
            for augmentation in (self.augmentation, None)
        )
        return ImageDataset(self.train, train, seed), ImageDataset(self.validation, validation, seed)


def load_images(data: Mapping[str, Any] | None) -> ImageData:
    """Find the images that the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.

    Raises:
        ConfigError: Unknown keys or values of the wrong type in ``data``, all of them.
        DataError: The folder has neither layout, a split is empty, or an image cannot be read.
    """
    config = parse_section(DataConfig, data)
    train: Sequence[tuple[Image.Image | str, int]]
    validation: Sequence[tuple[Image.Image | str, int]]
    fraction, seed = config.validation_fraction, config.split_seed
    if config.path is None:
        images_NHW, labels = handwritten_digits()
        images = [Image.fromarray(image_HW).convert("RGB") for image_HW in images_NHW]
        names = [f"digit {index}" for index in range(len(labels))]
        train, validation = split(list(zip(images, labels, strict=True)), names, fraction, seed=seed)
        classes, default, source = [str(digit) for digit in range(10)], DIGITS, "handwritten digits"
    else:
        found = find_images(config.path, validation_fraction=fraction, split_seed=seed)
        train, validation = found.train, found.validation
        classes, default, source = found.classes, PHOTOGRAPHS, config.path
        check_images([path for path, _ in (*found.train, *found.validation)], config.check_images)
    given = {name: getattr(config, name) for name in ("crop_scale", "horizontal_flip", "color_jitter")}
    return ImageData(
        train=train,
        validation=validation,
        classes=classes,
        augmentation=replace(default, **{name: value for name, value in given.items() if value is not None}),
        num_workers=config.num_workers,
        description=(
            f"{source}, {len(classes)} classes: {len(train):,} images for training, "
            f"{len(validation):,} for validation"
        ),
    )


def normalization(source: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel: a checkpoint's image processor's, or else ViT's own."""
    if source is None:
        return MEAN, STD
    try:
        file = cached_file(source, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
        processor = json.loads(Path(file).read_bytes()) if file else {}
    except (OSError, ValueError):
        processor = {}  # a missing checkpoint is reported where its weights are read
    return tuple(processor.get("image_mean", MEAN)), tuple(processor.get("image_std", STD))


def processor_config(image_size: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """The ``preprocessor_config.json`` by which Hugging Face prepares images as validation does here.

    Args:
        image_size: Side of the images that the model sees.
        mean: Of each channel.
        std: Of each channel.
    """
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": image_size, "width": image_size},
        "resample": int(Image.Resampling.BILINEAR),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }
