"""Images to learn from: scikit-learn's handwritten digits, or those of any folder.

Legend of shape suffixes: N images, C colours, H height and W width in pixels.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from determined_ds.errors import DataError, Problem
from model_defs.common.images import KEY, handwritten_digits, opened
from model_defs.common.split import split

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"})
# Of more problems than this, those beyond are cut.
MAX_PROBLEMS = 10
DIGITS_EVERY = 5  # each fifth digit is for validation


class Images(Dataset[Tensor]):
    """Images in memory: item ``i`` is image_CHW, float32 in [-1, 1].

    Args:
        pixels_NHWC: Bytes.
    """

    def __init__(self, pixels_NHWC: np.ndarray) -> None:
        self.pixels_NHWC = pixels_NHWC

    def __len__(self) -> int:
        return len(self.pixels_NHWC)

    def __getitem__(self, index: int) -> Tensor:
        return to_tensor(self.pixels_NHWC[index])


class ImageFiles(Dataset[Tensor]):
    """Images on disk, read on access; the shorter side is scaled to the size, and the middle cut out.

    Args:
        files: Their paths.
        image_size: Height and width, in pixels.
        num_colours: 1 or 3.
    """

    def __init__(self, files: list[Path], image_size: int, num_colours: int) -> None:
        self.files = files
        self.image_size = image_size
        self.num_colours = num_colours

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with opened(self.files[index]) as image:
            pixels_HWC = _squared(image.convert("L" if self.num_colours == 1 else "RGB"), self.image_size)
        return to_tensor(pixels_HWC)


def _squared(image: Image.Image, size: int) -> np.ndarray:
    """pixels_HWC of the middle of an image."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def to_tensor(pixels_HWC: np.ndarray) -> Tensor:
    """Bytes as image_CHW, float32 in [-1, 1]."""
    return torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1).float() / 127.5 - 1


class WithLatents(Dataset[tuple[Tensor, Tensor]]):
    """Real images for validation, each with the latents of a generated one.

    Item ``i`` is ``(image_CHW, latents_Z)``; the latents are decided by (seed, i), so every validation generates the
    same ones, whichever rank it is on.
    """

    def __init__(self, images: Dataset[Tensor], latent_size: int, seed: int) -> None:
        self.images = images
        self.latent_size = latent_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], latents_of(self.seed, index, self.latent_size)


def latents_of(seed: int, index: int, latent_size: int) -> Tensor:
    """latents_Z, decided by seed and index."""
    generator = np.random.default_rng([seed, index])
    return torch.from_numpy(generator.standard_normal(latent_size, dtype=np.float32))


def digits(image_size: int) -> tuple[Images, Images]:
    """Scikit-learn's 1797 handwritten digits, 8 x 8 pixels, for training and for validation.

    Raises:
        DataError: scikit-learn is not installed.
    """
    bytes_NHW, _ = handwritten_digits()
    pixels = np.stack([_squared(Image.fromarray(digit), image_size) for digit in bytes_NHW])
    held_out = np.arange(len(pixels)) % DIGITS_EVERY == 0
    return Images(pixels[~held_out]), Images(pixels[held_out])


def image_files(path: str, validation_fraction: float) -> tuple[list[Path], list[Path]]:
    """The images of a folder, recursively: for training, and by a hash of each one's name for validation.

    Raises:
        DataError: No such folder, files that are not images (the first ten), or a single image.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        message = f"no such folder, seen from {os.getcwd()}."
        raise DataError(_problem(path, message, "a folder that every slot can read, or data.path: null"))
    files = sorted(
        file
        for file in root.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise DataError(
            _problem(path, "there is no image in it.", f"files {', '.join(sorted(IMAGE_SUFFIXES))}")
        )
    problems: list[Problem] = []
    for file in files:
        try:
            with opened(file):
                pass  # the header; a file that is cut short is found when it is read
        except DataError as error:
            problems += error.problems
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise DataError(problems)
    names = [file.relative_to(root).as_posix() for file in files]
    train, validation = split(files, names, validation_fraction)
    if not validation:
        raise DataError(_problem(path, "has one image, and validation needs another.", "more images"))
    return train, validation


def _problem(path: str, message: str, fix: str) -> Problem:
    return Problem(key=KEY, value=path, message=message, fix=fix)
