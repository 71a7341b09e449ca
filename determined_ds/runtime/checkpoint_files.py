"""Checkpoints as files: which there are, without loading torch."""

from __future__ import annotations

import json
from pathlib import Path

METADATA = "metadata.json"


def newest_checkpoint(folder: Path) -> tuple[str, int] | None:
    """The complete checkpoint in ``folder`` that has trained longest: its uuid and ``steps_completed``."""
    found = []
    for path in folder.glob(f"*/{METADATA}"):
        try:
            steps = int(json.loads(path.read_text())["steps_completed"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append((steps, path.stat().st_mtime, path.parent.name))
    if not found:
        return None
    steps, _, uuid = max(found)
    return uuid, steps
