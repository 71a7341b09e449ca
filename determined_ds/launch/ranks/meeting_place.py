"""A temporary folder in which the ranks of a run meet; of a launcher that was killed, the next one clears it away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "det-ds-run-"
# One that is younger may not be held yet.
YOUNG_S = 60.0


class MeetingPlace:
    """Made for its user only, and held by all that inherit its descriptor.

    Attributes:
        folder: The folder.
        descriptor: To be inherited.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.descriptor = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # a file system without locks: nobody clears it away
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear_away(self.folder.parent)

    def remove(self) -> None:
        """Remove it; nobody is in it any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.descriptor)


def _clear_away(parent: Path) -> None:
    """Remove this user's folders that nobody holds."""
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
