"""Images as the model takes them: as they are for validation, varied for training.

A variation is drawn from the generator it is given, and from nothing else.

Legend of shape suffixes: C channels, H height, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# Width by height of a crop, at the least and at the most.
RATIOS = (3 / 4, 4 / 3)
# Crops that lie within the image are looked for this often; then the whole image is taken.
TRIES = 10
# Parts of red, green and blue in grey: ITU-R 601, which PIL's own conversion has.
GREY_C = np.array([0.299, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are varied.

    Args:
        crop_scale: The least share of the image's area that a crop keeps, in (0, 1]; at 1, almost all of it.
        horizontal_flip: Mirror every second image; not for digits and letters, which then mean something else.
        color_jitter: Brightness, contrast and saturation are each multiplied by 1 - this to 1 + this; in [0, 1).
    """

    crop_scale: float
    horizontal_flip: bool
    color_jitter: float


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
        """pixels_CHW, float32. ``image`` is RGB."""
        side = (self.image_size, self.image_size)
        if self.augmentation is None:
            # To the square at once, as ViTImageProcessor does, so that nothing is cut off.
            pixels_HWC = _array(image.resize(side, Image.Resampling.BILINEAR))
        else:
            box = random_box(image.width, image.height, self.augmentation.crop_scale, generator)
            pixels_HWC = _array(image.resize(side, Image.Resampling.BILINEAR, box=box))
            if self.augmentation.horizontal_flip and generator.random() < 0.5:
                pixels_HWC = pixels_HWC[:, ::-1]
            pixels_HWC = jittered(pixels_HWC, self.augmentation.color_jitter, generator)
        normal_HWC = (pixels_HWC - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return torch.from_numpy(np.ascontiguousarray(normal_HWC.transpose(2, 0, 1)))


def _array(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.float32) / np.float32(255)


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
    if not strength:
        return pixels_HWC
    brightness, contrast, saturation = generator.uniform(1 - strength, 1 + strength, 3).astype(np.float32)
    pixels_HWC = np.clip(pixels_HWC * brightness, 0, 1)
    mean = (pixels_HWC @ GREY_C).mean()
    pixels_HWC = np.clip(mean + (pixels_HWC - mean) * contrast, 0, 1)
    grey_HWC = (pixels_HWC @ GREY_C)[..., None]
    clipped: np.ndarray = np.clip(grey_HWC + (pixels_HWC - grey_HWC) * saturation, 0, 1)
    return clipped
