"""Which classes ``python3 -m determined_ds.train MODULE:CLASS`` takes for a trial."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from determined_ds.errors import EntrypointError, TrialError
from tests.package import trial_class

SOURCE = """
from determined_ds import DataParallelTrial

class Model: ...

class Half(DataParallelTrial):
    def build_model(self): ...
    def loss(self, model, batch): ...
    def build_training_data_loader(self): ...

class Whole(Half):
    def build_validation_data_loader(self): ...
"""
NUMBER = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current directory; another one each time, for modules are imported once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"module_of_trials_{next(NUMBER)}"
    Path(f"{name}.py").write_text(SOURCE)
    return name


def test_a_subclass_that_defines_all(module: str) -> None:
    assert trial_class(f"{module}:Whole").__name__ == "Whole"


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        (
            "{}:Model",
            EntrypointError,
            r"Model must be a subclass of DeepSpeedTrial.*\n.*use one of .*: Half, Whole",
        ),
        ("{}:Wohle", EntrypointError, r"has no Wohle.*\n.*Half, Whole"),
        ("no_such.{}:Whole", EntrypointError, "there is no module no_such"),
        ("{}:Half", TrialError, "Half .*does not define build_validation_data_loader"),
    ],
)
def test_any_other_is_refused(module: str, spec: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        trial_class(spec.format(module))


def test_an_import_that_fails_in_it_keeps_its_traceback(module: str) -> None:
    Path(f"{module}.py").write_text("import no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        trial_class(f"{module}:Whole")
