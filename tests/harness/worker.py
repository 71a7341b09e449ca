"""In place of ``python``, a fork (``forked.py``) in its namespaces.

- ``python tests/harness/worker.py -u -c ...``: a worker of pytest-xdist;
- ``python tests/harness/worker.py -m MODULE ...``: a module in a container of the cluster's.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # it is run by its path
Forked = importlib.import_module("tests.harness.forked").Forked
if sys.argv[1] == "-m":
    files = [
        0,
        1,
        2,
        *(os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/user", "/proc/self/ns/mnt", "/")),
    ]
    try:
        process = Forked(
            "tests.harness.forked:module",
            sys.argv[2:],
            os.getcwd(),
            env=os.environ,
            cwd=Path("/"),
            files=files,
        )
    except OSError:  # the server is in another network
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])

    def hand_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, hand_on)
else:
    process = Forked("tests.harness.forked:worker", env=os.environ, cwd=Path.cwd(), files=[0, 1, 2])
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)
