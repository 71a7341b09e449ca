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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from determined.common import storage

ROOT = Path(__file__).resolve().parents[2]
LOOK_EVERY_S = 0.2


def upload(
    config: Mapping[str, Any], folder: Path, uuid: str, names: Sequence[str], beat: Callable[[], None]
) -> None:
    """Upload files, and wait for it."""
    order = {"config": dict(config), "folder": str(folder), "uuid": uuid, "names": list(names)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            while process.poll() is None:
                beat()
                time.sleep(LOOK_EVERY_S)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
        if process.returncode:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise OSError(
                f"checkpoint_storage refuses it: {lines[-1] if lines else 'the upload ended early'}"
            )


@contextmanager
def all_but(manager: Any, names: set[str]) -> Iterator[None]:
    """In here, a storage manager leaves out files that are uploaded."""
    if not names:
        yield
        return
    whole = manager.upload

    def rest(src: Any, dst: str, paths: set[str] | None = None) -> None:
        there = set(manager._list_directory(src)) if paths is None else paths
        whole(src, dst, there - names)

    manager.upload = rest
    try:
        yield
    finally:
        del manager.upload


def main() -> None:
    """Do what stands in the first line of stdin."""
    order = json.loads(sys.stdin.buffer.readline())

    def end_with_parent() -> None:
        sys.stdin.buffer.read()  # to the end of the rank, which writes nothing more
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        manager = storage.build(order["config"], container_path=None)
        manager.upload(order["folder"], order["uuid"], set(order["names"]))
    except Exception as error:  # whatever the client of a storage raises
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
