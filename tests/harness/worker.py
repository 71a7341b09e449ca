"""In place of ``python``, a worker of pytest-xdist: a fork (``forked.py``), which reads its program from stdin."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # it is run by its path
forked = importlib.import_module("tests.harness.forked")
process = forked.Forked("tests.harness.forked:worker", env=os.environ, cwd=Path.cwd(), files=[0, 1, 2])
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)
