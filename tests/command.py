"""``det-ds`` as its users start it: a process of its own, that must leave none behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
DET_DS = Path(sys.executable).with_name("det-ds")
# No test takes as long: a guard against hangs, not a measure.
TIMEOUT_S = 600.0


def det_ds(
    *arguments: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    accelerator: str = "cpu",
) -> subprocess.CompletedProcess[str]:
    """Run ``det-ds`` to its end.

    Args:
        arguments: Of the command; with a ``--run-dir``, no process that was given it may be left at the end.
        cwd: Where it is started.
        env: More environment variables.
        timeout_s: How long it may take.
        accelerator: ``cpu`` or ``cuda``.
    """
    words = [str(argument) for argument in arguments]
    done = subprocess.run(
        [str(DET_DS), *words, "--accelerator", accelerator],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if "--run-dir" in words:
        left = processes_of(Path(words[words.index("--run-dir") + 1]))
        assert not left, f"left running: {left}"
    return done


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Every process, whoever its parent is, that was started with this run directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(run_dir.resolve()) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
