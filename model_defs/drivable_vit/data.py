"""Samples for the drivable-space transformer: frames on disk, or scenes drawn on the spot.

Drawn scenes are decided by (seed, split, index) and nothing else: the same on every rank, in every worker, and
again on every resume.

Legend of shape suffixes: M moments, V views, C colours, H height and W width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from model_defs.common.sections import Section, parse_section
from model_defs.drivable_vit.frames import FrameWindows, read_frames, to_tensors
from model_defs.drivable_vit.renderer import MAX_VIEWS, draw_scene, render

NOISE = 0.03  # of the drawn cameras, standard deviation of a colour in [0, 1]
TRAIN, VALIDATION = 0, 1


class DataConfig(Section, extra="forbid"):
    """The ``data`` section of the experiment YAML."""

    path: str | None = Field(None, min_length=1)
    """Folder of frames, see ``frames.py``; None: drawn scenes."""
    num_moments: int = Field(2, ge=1)
    """M, moments of a sample."""
    num_views: int = Field(3, ge=1, le=MAX_VIEWS)
    """V of drawn scenes, at most six; a folder has its own."""
    num_train_scenes: int = Field(2048, ge=1)
    """Drawn scenes for training; the next epoch draws the same again."""
    num_validation_scenes: int = Field(128, ge=1)
    """Drawn scenes for validation, none of which is trained on."""
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    """About this part of a folder's scenes is for validation, where it has no ``train`` and ``val``."""
    num_workers: int = Field(0, ge=0)
    """Processes a rank that read or draw ahead."""


class DrawnScenes(Dataset[tuple[Tensor, Tensor]]):
    """Road scenes, drawn on access.

    Item ``i`` is ``(pixels_MVCHW, masks_MVHW)``: float32 in [-1, 1], and uint8, 1 where one can drive.

    Args:
        num_scenes: How many there are.
        seed: Of all of them, and of their split: ``(seed, TRAIN)`` or ``(seed, VALIDATION)``.
        img_size: Height and width of a view, in pixels.
        num_views: Cameras of the rig.
        num_moments: Moments, the last of which is the present one.
    """

    def __init__(
        self, num_scenes: int, seed: tuple[int, int], *, img_size: int, num_views: int, num_moments: int
    ) -> None:
        self.num_scenes = num_scenes
        self.seed = seed
        self.img_size = img_size
        self.num_views = num_views
        self.num_moments = num_moments

    def __len__(self) -> int:
        return self.num_scenes

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_scenes:
            raise IndexError(f"scene {index} of {self.num_scenes}")
        generator = np.random.default_rng([*self.seed, index])
        scene, size = draw_scene(generator), self.img_size
        seen = [
            [
                render(scene, img_size=size, view=view, num_views=self.num_views, moments_ago=moments_ago)
                for view in range(self.num_views)
            ]
            for moments_ago in reversed(range(self.num_moments))
        ]
        images = np.array([[image for image, _ in views] for views in seen])
        masks = np.array([[mask for _, mask in views] for views in seen])
        noisy = images + generator.normal(0.0, NOISE, images.shape)
        return to_tensors((np.clip(noisy, 0, 1) * 255).astype(np.uint8), masks)


class DrivableData(NamedTuple):
    """Samples, ready to train on: of V views and M moments, for data loaders with so many workers."""

    train: Dataset[tuple[Tensor, Tensor]]
    validation: Dataset[tuple[Tensor, Tensor]]
    num_views: int
    num_moments: int
    num_workers: int


def load_data(data: Mapping[str, Any] | None, *, img_size: int, seed: int) -> DrivableData:
    """Open what the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.
        img_size: Height and width of a view, in pixels.
        seed: Of the drawn scenes.

    Raises:
        ConfigError: Unknown keys or values of the wrong type, all of them.
        DataError: The folder does not have the layout, or a file in it cannot be read.
    """
    config = parse_section(DataConfig, data, section="data")
    moments, workers = config.num_moments, config.num_workers
    if config.path is None:
        shape = {"img_size": img_size, "num_views": config.num_views, "num_moments": moments}
        train = DrawnScenes(config.num_train_scenes, (seed, TRAIN), **shape)
        validation = DrawnScenes(config.num_validation_scenes, (seed, VALIDATION), **shape)
        return DrivableData(train, validation, config.num_views, moments, workers)
    scenes, held_out, num_views = read_frames(config.path, config.validation_fraction, moments)
    train_windows, windows = (FrameWindows(each, moments, img_size) for each in (scenes, held_out))
    return DrivableData(train_windows, windows, num_views, moments, workers)
