"""The ``data`` section of the experiment YAML -> images for training and for validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from model_defs.common.sections import Section, parse_section
from model_defs.dcgan.images import ImageFiles, digits, image_files


class DataConfig(Section):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """Folder of images, at any depth; None: scikit-learn's handwritten digits."""
    num_colours: Literal[1, 3] = 3
    """C of a folder's images: 3, or 1 for grey. Digits are grey."""
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    """About this part of a folder's images is for validation."""
    num_workers: int = Field(0, ge=0)
    """Processes a rank that read ahead."""


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Images, ready to train on: image_CHW, float32 in [-1, 1].

    Args:
        train: For training.
        validation: For validation.
        num_colours: C.
        num_workers: For the data loaders.
    """

    train: Dataset[Tensor]
    validation: Dataset[Tensor]
    num_colours: int
    num_workers: int


def load_images(data: Mapping[str, Any] | None, *, image_size: int) -> ImageData:
    """Open what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        image_size: Height and width that images are scaled to, in pixels.

    Raises:
        ConfigError: Unknown keys or values of the wrong type, all of them.
        DataError: The folder cannot be read, or holds no images.
    """
    config = parse_section(DataConfig, data)
    if config.path is None:
        train, validation = digits(image_size)
        return ImageData(train=train, validation=validation, num_colours=1, num_workers=config.num_workers)
    colours = config.num_colours
    train_files, validation_files = image_files(config.path, config.validation_fraction)
    return ImageData(
        train=ImageFiles(train_files, image_size, colours),
        validation=ImageFiles(validation_files, image_size, colours),
        num_colours=colours,
        num_workers=config.num_workers,
    )
