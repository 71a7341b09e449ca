"""A context directory to run and to break, and a run of it that tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.own_runs import OWN_MODEL, run


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A copy of ``own_model``: ``experiment.yaml``, ``ds.json`` and ``trial.py``."""
    copied = shutil.copytree(OWN_MODEL, tmp_path / "own_model", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(copied)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``own_model``, ``run`` and ``stdout``: six batches by two ranks, checkpoints at 2, 4 and 6.

    Tests read it. What changes a file of it takes ``copied``.
    """
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(OWN_MODEL, folder / "own_model", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(folder / "own_model", folder / "run")
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "stdout").write_text(done.stdout)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of ``trained``, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))
