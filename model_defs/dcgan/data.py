"""The ``data`` section of the experiment YAML -> images for training and for validation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.utils.data import Dataset

from determined_ds.errors import ConfigError, Problem
from model_defs.dcgan.images import ImageFiles, digits, image_files


class DataConfig(BaseModel):
    """The ``data`` section of the experiment YAML."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

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


def parse_data_config(data: Mapping[str, Any] | None) -> DataConfig:
    """Check the section's keys and values, before any file is read.

    Raises:
        ConfigError: Everything that is wrong.
    """
    if data is not None and not isinstance(data, Mapping):
        message = "is a mapping of keys to values."
        raise ConfigError(Problem(key="data", value=data, message=message, fix="data: {path: null}"))
    try:
        return DataConfig(**(data or {}))
    except ValidationError as error:
        raise ConfigError(_problem(item) for item in error.errors()) from None


def _problem(item: Any) -> Problem:
    fields = DataConfig.model_fields
    name, value = item["loc"][0], item["input"]
    if item["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(str(name), fields, n=1)
        fix = f"did you mean data.{nearest[0]}?" if nearest else f"one of {', '.join(fields)}"
        return Problem(key=f"data.{name}", value=value, message="no such key.", fix=fix)
    default = "null" if fields[name].default is None else fields[name].default
    message = f"{item['msg'].lower()}."
    return Problem(key=f"data.{name}", value=value, message=message, fix=f"data.{name}: {default}")


def load_images(data: Mapping[str, Any] | None, *, image_size: int) -> ImageData:
    """Open what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        image_size: Height and width that images are scaled to, in pixels.

    Raises:
        ConfigError: Unknown keys or values of the wrong type, all of them.
        DataError: The folder cannot be read, or holds no images.
    """
    config = parse_data_config(data)
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
