"""``python tests/worker.py``: in place of ``python``, for the workers of pytest-xdist, a fork (``forked.py``)."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # it is run by its path
Forked = importlib.import_module("tests.forked").Forked
sys.exit(Forked("tests.forked:worker", env=os.environ, cwd=Path.cwd(), files=[0, 1, 2]).wait())
