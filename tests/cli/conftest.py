"""A context directory of one's own to run and to break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

OWN_MODEL = Path(__file__).with_name("own_model")


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A copy of ``own_model``: ``experiment.yaml``, ``ds.json`` and ``trial.py``."""
    copied = shutil.copytree(OWN_MODEL, tmp_path / "own_model", ignore=shutil.ignore_patterns("__pycache__"))
    return Path(copied)
