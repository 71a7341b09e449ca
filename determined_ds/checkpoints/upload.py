"""Upload files of a checkpoint in a process of its own, while the rank trains.

Clients of storages draw random numbers, and Determined's managers set Python's generator back when they are done: in a
thread of the rank, its training would no longer be exact.

Source: ``preserve_random_state`` in determined 0.38.1's ``util.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined.common import storage

from determined_ds.rundir.signals import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.2


def upload(
    config: Mapping[str, Any], folder: Path, uuid: str, names: Sequence[str], beat: Callable[[], None]
) -> None:
    """Upload files, and wait for it."""
    order = {"config": dict(config), "folder": str(folder), "uuid": uuid, "names": list(names)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:  # it has secrets of the storage
        asked.write(json.dumps(order).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=asked,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            while process.poll() is None:
                beat()
                time.sleep(LOOK_EVERY_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "the upload ended early"
            raise OSError(f"checkpoint_storage refuses it: {why}")


if __name__ == "__main__":
    die_with_parent()
    given = json.load(sys.stdin)
    try:
        manager = storage.build(given["config"], container_path=None)
        manager.upload(given["folder"], given["uuid"], set(given["names"]))
    except Exception as error:  # whatever the client of a storage raises
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
        os._exit(1)
