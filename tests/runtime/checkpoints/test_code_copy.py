"""``code/`` in a checkpoint: what is copied, and what is said where this library is another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.runtime.checkpoints import code_copy
from determined_ds.runtime.checkpoints.code_copy import differing_library, write_code


def context_in(folder: Path) -> Path:
    """A context directory with code, a configuration, data, and what an import leaves."""
    files = {
        "trial.py": "class Trial: ...\n",
        "models/__init__.py": "",
        "models/sizes.json": "{}",
        "models/__pycache__/sizes.pyc": "compiled",
        "weights.bin": "x" * (code_copy.MAX_FILE_BYTES + 1),
    }
    for name, text in files.items():
        path = folder / "context" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "context"


def copied(folder: Path) -> set[str]:
    write_code(folder, context_in(folder))
    found = (folder / "code").rglob("*")
    return {str(path.relative_to(folder / "code")) for path in found if path.is_file()}


def test_code_and_its_small_files_are_copied_and_data_is_not(tmp_path: Path) -> None:
    assert copied(tmp_path) == {"trial.py", "models/__init__.py", "models/sizes.json"}
    assert (tmp_path / "code/trial.py").read_text() == "class Trial: ...\n"


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_of_more_than_anybodys_code_only_python_is_copied(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_copy, limit, 1)
    assert copied(tmp_path) == {"trial.py", "models/__init__.py"}


def test_a_library_that_differs_is_named_by_its_modules(tmp_path: Path) -> None:
    here = Path(code_copy.__file__).resolve().parents[2]
    stored = tmp_path / "determined_ds"
    (stored / "runtime").mkdir(parents=True)
    (stored / "errors.py").write_bytes((here / "errors.py").read_bytes())
    assert differing_library(tmp_path) == []
    (stored / "errors.py").write_text("another")
    (stored / "runtime/gone.py").write_text("")
    assert differing_library(tmp_path) == ["errors.py", "runtime/gone.py"]
    assert differing_library(here.parent) == []
