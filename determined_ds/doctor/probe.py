"""Write, read and delete a small object in a checkpoint storage, in a separate process that can be ended.

    python3 -m determined_ds.doctor.probe < checkpoint_storage.json

Exit code 0 on success; else the last line of stderr names the step that failed, and why.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

NAME, CONTENT = "probe", b"written by det-ds doctor; it may be deleted\n"


def main() -> int:
    """Probe the storage that stdin describes. Returns the exit code."""
    config: dict[str, Any] = json.loads(sys.stdin.read())
    step = "loading Determined"
    try:
        from determined.common import constants, storage

        step = "connecting"
        mount = constants.SHARED_FS_CONTAINER_PATH
        in_container = config["type"] == "shared_fs" and os.path.ismount(mount)
        manager = storage.build(config, container_path=mount if in_container else None)
        name = f"doctor-{uuid.uuid4()}"
        with tempfile.TemporaryDirectory() as folder:
            sent, got = Path(folder, "sent"), Path(folder, "got")
            sent.mkdir()
            (sent / NAME).write_bytes(CONTENT)
            step = "writing"
            manager.upload(sent, name)
            try:
                step = "reading"
                manager.download(name, got)
                if (got / NAME).read_bytes() != CONTENT:
                    raise OSError("what came back is not what was written")
            finally:
                step = step if step == "reading" and sys.exc_info()[0] else "deleting"
                manager.delete(name, ["**/*"])
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"{step}: {type(error).__name__}: {first[:300]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
