"""A temporary folder that the ranks of a run share; the next launcher removes that of one that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "det-ds-run-"
# A younger one may not be held yet.
YOUNG_S = 60.0


class SharedTemp:
    """Made for this user only, and held by all processes that inherit its descriptor.

    Attributes:
        folder: The folder.
        descriptor: For the ranks to inherit.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.descriptor = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks: it stays
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_abandoned(self.folder.parent)

    def remove(self) -> None:
        """Remove it; the ranks have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders that no process holds."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
