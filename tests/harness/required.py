"""What a test needs of the machine and may not find: it skips and says so, or fails where the environment requires it.

``REQUIRE=browser,cluster,machines`` turns such skips into failures: CI has all three, and a green run of it tests them.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

REQUIRE = "REQUIRE"
# What may be required, and how a machine gets it.
INSTALL = {
    "browser": "Chromium (Debian: apt install chromium)",
    "cluster": "Linux with unshare, as root or with user namespaces",
    "disk": "the right to mount, as root",
    "machines": "Linux as root, with iproute2 and util-linux (apt install iproute2 util-linux)",
    "mpi": "an MPI launcher (apt install openmpi-bin)",
    "real-cluster": "the address of a Determined master in DET_MASTER",
    "gpu": "an NVIDIA GPU",
}


def skip_or_fail(name: str, reason: str) -> NoReturn:
    """Leave a test out for want of something."""
    assert name in INSTALL, name
    if name in os.environ.get(REQUIRE, "").split(","):
        pytest.fail(f"{name} is required ({REQUIRE}) and missing: {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}")
