"""``metrics.jsonl``: a line is appended at once, so that whatever ends a run can tear the last one only."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path


def append_line(path: Path, line: str) -> None:
    """Append a line, its end included, by one call of the system."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        rest = line.encode()
        while rest:  # what a full disk has no room for is written, or fails, at the second time
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def put_on_disk(path: Path) -> None:
    """Have the system put on the disk what was appended, before anything that counts on it."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def kept_until(path: Path, steps: int) -> str | None:
    """The lines without those of batches that will be trained again, and without what a killed run left half-written.

    Args:
        path: The file.
        steps: Batches that will not.

    Returns:
        None where that is all of the file, or there is none.
    """
    if not path.exists():
        return None
    text, kept = path.read_text(errors="replace"), []
    for line in text.splitlines():
        try:
            if json.loads(line)["steps_completed"] <= steps:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    return None if "".join(kept) == text else "".join(kept)
