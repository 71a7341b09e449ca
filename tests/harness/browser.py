"""A real browser, where one is installed: Chromium without a window."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def chromium(address: str, *words: str, width: int = 1400, height: int = 3000) -> tuple[str, list[str]]:
    """The page after two seconds of its time, and what the browser has complained of."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"),
                *(f"--window-size={width},{height}", "--virtual-time-budget=2000", "--enable-logging=stderr"),
                *(*words, "--dump-dom", address),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
