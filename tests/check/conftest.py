"""A copy of the templates and their models, to make mistakes in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness.command import ROOT


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the context directory, which is the current folder; all in it checks clean."""
    for name in ("experiments", "model_defs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".detignore", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
