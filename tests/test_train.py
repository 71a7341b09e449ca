"""Which classes ``python3 -m determined_ds.train MODULE:CLASS`` takes for a trial."""

from __future__ import annotations

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
REFUSED = {
    "own_trials:Model": (EntrypointError, r"Model must be a subclass of DeepSpeedTrial.*\n.*: Half, Whole"),
    "own_trials:Wohle": (EntrypointError, r"has no Wohle.*\n.*Half, Whole"),
    "no_such.own_trials:Whole": (EntrypointError, "there is no module no_such"),
    "own_trials:Half": (TrialError, "Half .*does not define build_validation_data_loader"),
    "own_import:Whole": (ModuleNotFoundError, "no_such_module"),  # with its traceback
}


def test_a_subclass_that_defines_all_is_taken_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_trials.py").write_text(SOURCE)
    Path("own_import.py").write_text("import no_such_module")
    assert trial_class("own_trials:Whole").__name__ == "Whole"
    for spec, (error, says) in REFUSED.items():
        with pytest.raises(error, match=says):
            trial_class(spec)
