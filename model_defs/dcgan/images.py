"""Images to learn from: scikit-learn's handwritten digits, or those of any folder.

Legend of shape suffixes: N images, C colours, H height and W width in pixels.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from determined_ds.errors import DataError, Problem

KEY = "data.path"
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
    """Images on disk, read when asked for; the shorter side is scaled to the size, and the middle cut out.

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
        path = self.files[index]
        try:
            with Image.open(path) as opened:
                image = opened.convert("L" if self.num_colours == 1 else "RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(_unreadable(path, error)) from error
        return to_tensor(_squared(image, self.image_size))


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
    """Real images for validation, each with the latents of a generated one to set beside it.

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
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        message = "the default, handwritten digits, comes with scikit-learn, which is not installed."
        fix = "pip install scikit-learn; or data.path: a folder of images"
        raise DataError(Problem(key=KEY, value=None, message=message, fix=fix)) from error
    bytes_NHW = (load_digits().images * (255 / 16)).round().astype(np.uint8)
    pixels = np.stack([_squared(Image.fromarray(digit), image_size) for digit in bytes_NHW])
    held_out = np.arange(len(pixels)) % DIGITS_EVERY == 0
    return Images(pixels[~held_out]), Images(pixels[held_out])


def image_files(path: str, validation_fraction: float) -> tuple[list[Path], list[Path]]:
    """The images of a folder, recursively: for training, and by a hash of each one's name for validation.

    Raises:
        DataError: No such folder, files that are no images (the first ten), or a split without any.
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
            with Image.open(file):
                pass  # the header; what is cut short further on is found when it is read
        except (OSError, SyntaxError, ValueError) as error:
            problems.append(_unreadable(file, error))
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise DataError(problems)
    held_out = [_place(file.relative_to(root).as_posix()) < validation_fraction for file in files]
    train = [file for file, held in zip(files, held_out, strict=True) if not held]
    validation = [file for file, held in zip(files, held_out, strict=True) if held]
    if not train or not validation:
        message = (
            f"{len(train)} of its {len(files)} images are for training, {len(validation)} for validation."
        )
        raise DataError(_problem(path, message, "more images, or another data.validation_fraction"))
    return train, validation


def _place(name: str) -> float:
    """A number in [0, 1) that the name decides."""
    digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _unreadable(path: Path, error: Exception) -> Problem:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    fix = "copy or make it again, or take it out"
    return _problem(str(path), f"is not an image that can be read: {reason}.", fix)


def _problem(path: str, message: str, fix: str) -> Problem:
    return Problem(key=KEY, value=path, message=message, fix=fix)
