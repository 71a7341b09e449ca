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
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers.utils.hub import cached_file

from determined_ds.errors import DataError, Problem
from model_defs.common.images import handwritten_digits, opened
from model_defs.common.sections import Section, parse_section
from model_defs.common.split import split
from model_defs.vit.augment import Augmentation, Pixels
from model_defs.vit.folders import MAX_PROBLEMS, Finder, ImageFile

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


class Images(Protocol):
    """Labelled images."""

    def __len__(self) -> int: ...

    def label(self, index: int) -> int:
        """From 0."""
        ...

    def image(self, index: int) -> Image.Image:
        """In RGB.

        Raises:
            DataError: It cannot be read; the file is named.
        """
        ...


@dataclass(frozen=True)
class Files:
    """Images of files."""

    files: Sequence[ImageFile]

    def __len__(self) -> int:
        return len(self.files)

    def label(self, index: int) -> int:
        return self.files[index].label

    def image(self, index: int) -> Image.Image:
        with opened(self.files[index].path) as image:
            return image.convert("RGB")


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, 8 x 8 pixels."""

    images_NHW: np.ndarray
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        return self.labels[index]

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.images_NHW[index]).convert("RGB")


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """``(pixels_CHW, label)`` of each image.

    An index beyond the number of images is one of a later epoch: image ``index % len`` in epoch ``index // len``,
    which is what :class:`EpochSampler` yields.

    Args:
        images: What there is.
        pixels: What becomes of it.
        seed: The run's.
    """

    def __init__(self, images: Images, pixels: Pixels, seed: int) -> None:
        self.images = images
        self.pixels = pixels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        epoch, sample = divmod(index, len(self))
        generator = np.random.default_rng([self.seed, epoch, sample])
        return self.pixels(self.images.image(sample), generator), self.images.label(sample)


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

    train: Images
    validation: Images
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
    if config.path is None:
        train, validation = _digits(config)
        classes, default, source = [str(digit) for digit in range(10)], DIGITS, "handwritten digits"
    else:
        finder = Finder(
            path=config.path,
            validation_fraction=config.validation_fraction,
            split_seed=config.split_seed,
        )
        found = finder.find()
        train, validation = Files(found.train), Files(found.validation)
        classes, default, source = found.classes, PHOTOGRAPHS, config.path
        _read_some(train, validation, config.check_images)
    return ImageData(
        train=train,
        validation=validation,
        classes=classes,
        augmentation=_augmentation(config, default),
        num_workers=config.num_workers,
        description=(
            f"{source}, {len(classes)} classes: {len(train):,} images for training, "
            f"{len(validation):,} for validation"
        ),
    )


def _augmentation(config: DataConfig, default: Augmentation) -> Augmentation:
    """The values of the section, and the default where it has none."""
    names = ("crop_scale", "horizontal_flip", "color_jitter")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return replace(default, **given)


def _digits(config: DataConfig) -> tuple[Images, Images]:
    images_NHW, labels = handwritten_digits()
    names = [f"digit {index}" for index in range(len(labels))]
    sides = split(range(len(labels)), names, config.validation_fraction, seed=config.split_seed)
    train, validation = (Digits(images_NHW[side], [labels[index] for index in side]) for side in sides)
    return train, validation


def _read_some(train: Images, validation: Images, count: int) -> None:
    """Read images evenly spread over both splits, so that broken data is found before training."""
    total = len(train) + len(validation)
    count = min(count, total)
    problems: list[Problem] = []
    for index in (place * total // count for place in range(count)):
        side, own = (train, index) if index < len(train) else (validation, index - len(train))
        try:
            side.image(own)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems[:MAX_PROBLEMS])


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
