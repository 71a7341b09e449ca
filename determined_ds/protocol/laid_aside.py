"""What a start writes into a run that is there already: aside, until its checkpoint has been loaded.

A start that ends before that, because the checkpoint is of another model or the data cannot be read, leaves the run as
it was.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from determined_ds.protocol.run_dir import RESULT

ASIDE = ".next"


def lay_aside(run_dir: Path) -> Path:
    """An empty folder for what the ranks of the next start read; without it, they read the run directory."""
    forget_aside(run_dir)
    folder = run_dir / ASIDE
    folder.mkdir(mode=0o700)
    return folder


def forget_aside(run_dir: Path) -> None:
    """Remove what an earlier start has left there."""
    shutil.rmtree(run_dir / ASIDE, ignore_errors=True)


def current(run_dir: Path, name: str = "") -> Path:
    """A file of the run as it is to be: the one that was laid aside, where there is one.

    Args:
        run_dir: The run directory.
        name: Of the file; of the folder that it is written to, if "".
    """
    aside = run_dir / ASIDE
    return aside / name if (aside / name).exists() else run_dir / name


def adopt(run_dir: Path) -> None:
    """Put what was laid aside in its place: the run goes on as it says."""
    aside = run_dir / ASIDE
    if aside.is_dir():
        for file in sorted(aside.iterdir()):
            file.replace(run_dir / file.name)
        (run_dir / RESULT).unlink(missing_ok=True)
        aside.rmdir()
