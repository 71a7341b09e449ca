"""Images for ViT: files, or handwritten digits -> tensors for training and for validation.

What a sample becomes is decided by the seed, the epoch and the sample alone: the same on every rank, with any number of
workers, and again on every resume.

Legend of shape suffixes: C channels, H height, W width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers.utils.hub import cached_file

from model_defs.common.files import split
from model_defs.common.images import handwritten_digits, opened
from model_defs.common.sections import Section, parse_section
from model_defs.vit.folders import find_images

# Of ViTImageProcessor: pixels from -1 to 1.
MEAN = STD = (0.5, 0.5, 0.5)
RATIOS = (3 / 4, 4 / 3)  # width by height of a crop, at the least and at the most
# Crops that lie within the image are looked for this often; then the whole image is taken.
TRIES = 10
# Parts of red, green and blue in grey: ITU-R 601, which PIL's own conversion has.
GREY_C = np.array([0.299, 0.587, 0.114], dtype=np.float32)
Labelled = tuple[Image.Image | str, int]


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


class Augmentation(NamedTuple):
    """How training images are varied; see :class:`DataConfig`."""

    crop_scale: float
    horizontal_flip: bool
    color_jitter: float


# Crops as torchvision and timm make them are for a hundred epochs and more; a fine-tuning is shorter.
PHOTOGRAPHS = Augmentation(crop_scale=0.3, horizontal_flip=True, color_jitter=0.2)
# A digit that is cut in half, or mirrored, is another one.
DIGITS = Augmentation(crop_scale=0.7, horizontal_flip=False, color_jitter=0.1)


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Images -> tensors.

    Args:
        image_size: Side in pixels, of the model.
        mean: Of each channel of pixels in [0, 1], subtracted.
        std: Of each channel, divided by.
        augmentation: None: as they are.
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation | None = None

    def __call__(self, image: Image.Image, generator: np.random.Generator) -> Tensor:
        """pixels_CHW, float32. ``image`` is RGB; a variation is drawn from ``generator`` and from nothing else."""
        box, varied = None, self.augmentation
        if varied is not None:
            box = random_box(image.width, image.height, varied.crop_scale, generator)
        # To the square at once, as ViTImageProcessor does, so that nothing else is cut off.
        side = (self.image_size, self.image_size)
        resized = image.resize(side, Image.Resampling.BILINEAR, box=box)
        pixels_HWC = np.asarray(resized, dtype=np.float32) / np.float32(255)
        if varied is not None and varied.horizontal_flip and generator.random() < 0.5:
            pixels_HWC = pixels_HWC[:, ::-1]
        if varied is not None and varied.color_jitter:
            pixels_HWC = jittered(pixels_HWC, varied.color_jitter, generator)
        normal_HWC = (pixels_HWC - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(normal_HWC.transpose(2, 0, 1)))


def random_box(
    width: int, height: int, scale: float, generator: np.random.Generator
) -> tuple[float, float, float, float]:
    """Left, upper, right and lower side of a crop with a share of the area in [scale, 1]."""
    for _ in range(TRIES):
        area = width * height * generator.uniform(scale, 1.0)
        ratio = math.exp(generator.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if wide <= width and high <= height:
            left, upper = generator.uniform(0, width - wide), generator.uniform(0, height - high)
            return left, upper, min(left + wide, width), min(upper + high, height)
    return 0.0, 0.0, float(width), float(height)


def jittered(pixels_HWC: np.ndarray, strength: float, generator: np.random.Generator) -> np.ndarray:
    """Brighter or darker, starker or flatter, more or less colourful; still in [0, 1]."""
    brightness, contrast, saturation = generator.uniform(1 - strength, 1 + strength, 3).astype(np.float32)
    pixels_HWC = np.clip(pixels_HWC * brightness, 0, 1)
    mean = (pixels_HWC @ GREY_C).mean()
    pixels_HWC = np.clip(mean + (pixels_HWC - mean) * contrast, 0, 1)
    grey_HWC = (pixels_HWC @ GREY_C)[..., None]
    clipped: np.ndarray = np.clip(grey_HWC + (pixels_HWC - grey_HWC) * saturation, 0, 1)
    return clipped


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """``(pixels_CHW, label)`` of each image.

    An index beyond the number of images is one of a later epoch: image ``index % len`` in epoch ``index // len``,
    which is what :class:`EpochSampler` yields.

    Args:
        images: Each one, or the path of its file; and its label, from 0.
        pixels: What becomes of it.
        seed: The run's.
    """

    def __init__(self, images: Sequence[Labelled], pixels: Pixels, seed: int) -> None:
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

    train: Sequence[Labelled]
    validation: Sequence[Labelled]
    classes: list[str]
    augmentation: Augmentation
    num_workers: int
    description: str

    def datasets(
        self, *, image_size: int, seed: int, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
    ) -> tuple[ImageDataset, ImageDataset]:
        """For training and for validation."""
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
        DataError: The folder has neither layout, or a split is empty.
    """
    config = parse_section(DataConfig, data)
    train: Sequence[Labelled]
    validation: Sequence[Labelled]
    fraction, seed = config.validation_fraction, config.split_seed
    if config.path is None:
        digits, labels = handwritten_digits()
        images = [(image.convert("RGB"), label) for image, label in zip(digits, labels, strict=True)]
        train, validation = split(images, [f"digit {i}" for i in range(len(images))], fraction, seed=seed)
        classes, default, source = [str(digit) for digit in range(10)], DIGITS, "handwritten digits"
    else:
        train, validation, classes = find_images(config.path, validation_fraction=fraction, split_seed=seed)
        default, source = PHOTOGRAPHS, config.path
    given = {name: getattr(config, name) for name in Augmentation._fields}
    return ImageData(
        train=train,
        validation=validation,
        classes=classes,
        augmentation=default._replace(**{name: value for name, value in given.items() if value is not None}),
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
