"""``python -m tests.worker``: in place of ``python``, for the workers of pytest-xdist, a fork (``forked.py``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.forked import Forked

sys.exit(Forked("tests.forked:worker", env=os.environ, cwd=Path.cwd(), files=[0, 1, 2]).wait())
