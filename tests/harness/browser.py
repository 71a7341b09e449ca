"""A real browser, where one is installed: Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def chromium(address: str) -> tuple[str, list[str]]:
    """The page after two seconds of its time, and what the browser has complained of."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"),
                *("--window-size=1400,5000", "--virtual-time-budget=2000", "--enable-logging=stderr"),
                *("--dump-dom", address),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
