"""What a trial's file imports from where there is none is named with its line, before anything is imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from determined_ds.config.aliases import IMPORTS
from determined_ds.documents.document import Document
from determined_ds.experiment.trial_file import check_trial_file
from tests.making import refusal

DOCUMENT = Document(name="x.yaml", data={"entrypoint": "python3 -m determined_ds.train trial:T"})


def checked(folder: Path, source: str, trial: str = "trial:T") -> None:
    (folder / "trial.py").write_text(source)
    check_trial_file(trial, folder, DOCUMENT)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import torch\nfrom determined.pytorch import DeepSpeedTrial\nclass T(DeepSpeedTrial): pass\n", 2),
        ("from determined.pytorch import DataLoader, DeepSpeedTrial as D\nclass T(D): pass\n", 1),
        ("from determined import pytorch\nclass T(pytorch.DeepSpeedTrial): pass\n", 2),
        ("import determined as det\nclass T(det.pytorch.DeepSpeedTrial): pass\n", 2),
    ],
)
def test_deepspeed_trial_is_not_where_pytorch_trial_is(tmp_path: Path, source: str, line: int) -> None:
    problem = refusal(lambda: checked(tmp_path, source))
    assert problem.origin == f"{tmp_path / 'trial.py'}:{line}"
    assert problem.message == "determined.pytorch has no DeepSpeedTrial"
    assert "from determined.pytorch.deepspeed import DeepSpeedTrial" in problem.fix
    assert "from determined_ds import DataParallelTrial" in problem.fix


@pytest.mark.parametrize(
    ("trial", "source", "said", "fix"),
    [
        ("trail:T", "class T: ...", "no module trail", "did you mean trial?"),
        ("trial.py:T", "class T: ...", "no module trial.py", "did you mean trial?"),
        ("..:T", "class T: ...", "..", "my_model.trial:MyTrial"),
        ("trial:MyTrail", "class MyTrial: ...", "module trial has no MyTrail", "did you mean MyTrial?"),
        (
            "trial:T",
            "import torch\nclass T(object)",
            "trial.py:2 is not Python: expected ':'",
            "fix trial.py:2",
        ),
        ("trial:T", "\0\1", "trial.py is not Python", "fix trial.py"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    tmp_path: Path, trial: str, source: str, said: str, fix: str
) -> None:
    problem = refusal(lambda: checked(tmp_path, source, trial))
    assert (problem.key, problem.value) == ("entrypoint", trial)
    assert said in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(
    "source",
    [
        "from determined.pytorch.deepspeed import DeepSpeedTrial\nclass T(DeepSpeedTrial): pass\n",
        "from determined.pytorch import deepspeed\nclass T(deepspeed.DeepSpeedTrial): pass\n",
        "from .pytorch import DeepSpeedTrial\nclass T(DeepSpeedTrial): pass\n",
        "try:\n    from determined.pytorch import DeepSpeedTrial\nexcept ImportError:\n    pass\nclass T: pass\n",
        "from elsewhere import T",
        "from elsewhere import *",
        "import elsewhere\n\nT = elsewhere.make()",
        "try:\n    import torch\nexcept ImportError:\n    raise\nelse:\n    class T:\n        ...",
        "def __getattr__(name):\n    return object",
    ],
)
def test_what_may_well_be_there_is_left_alone(tmp_path: Path, source: str) -> None:
    checked(tmp_path, source)


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_determined_has_it_elsewhere(module: str, name: str) -> None:
    assert not hasattr(importlib.import_module(module), name)
    fix = IMPORTS[module, name]
    if fix.startswith("from "):
        assert hasattr(importlib.import_module(fix.split()[1]), name)
