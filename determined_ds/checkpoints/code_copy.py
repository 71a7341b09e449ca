"""``code/`` in a checkpoint: the context directory of the trial, as in checkpoints of Determined's own trials.

So a checkpoint in the model registry can be loaded without the checkout that wrote it.

Source: ``write_user_code`` in determined 0.38.1's ``util.py``, which copies all of it, whatever its size.
"""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

from determined import constants

CODE = "code"
LIBRARY = "determined_ds"
# A larger file is data. If the rest is too much to be code, only Python files are kept.
MAX_FILE_BYTES = 2**20
MAX_FILES, MAX_BYTES = 2000, 16 * 2**20


def write_code(checkpoint: Path, context: Path = Path(constants.MANAGED_TRAINING_MODEL_COPY)) -> None:
    """Copy the code of a context directory into a checkpoint.

    Args:
        checkpoint: Its folder.
        context: The unchanged copy of the context directory that Determined keeps in a container: what
            ``det experiment create`` sent, without the files in ``.detignore``.
    """
    for name in _names(context):
        target = checkpoint / CODE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(context / name, target)


def _names(context: Path) -> list[Path]:
    sizes = {path.relative_to(context): path.stat().st_size for path in context.rglob("*") if path.is_file()}
    small = {
        name: size
        for name, size in sizes.items()
        if size <= MAX_FILE_BYTES and "__pycache__" not in name.parts
    }
    if len(small) <= MAX_FILES and sum(small.values()) <= MAX_BYTES:
        return list(small)
    return [name for name in small if name.suffix == ".py"]


def differing_library(code: Path) -> list[str]:
    """The modules of this library that differ between a checkpoint's code and this process."""
    stored, here = code / LIBRARY, Path(__file__).resolve().parents[1]
    if stored.resolve() == here:
        return []
    names = [str(path.relative_to(stored)) for path in sorted(stored.rglob("*.py"))]
    _, differing, missing = filecmp.cmpfiles(stored, here, names, shallow=False)
    return sorted([*differing, *missing])
