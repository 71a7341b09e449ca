"""A run to change: its checkpoints are real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.rundir.runs import scored

FIT = {"checkpoint_policy": "best", "stop_on_nan": False, "save_total_limit": 2}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two ranks in it, that has checkpoints at batch 4, of the best score, and at batch 8."""
    folder = tmp_path_factory.mktemp("trained")
    done = scored(folder, {2: "nan", 4: "3", 6: "inf", 8: "5"}, slots=2, **FIT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same folder, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "copied", symlinks=True))
