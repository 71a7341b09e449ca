"""What a trial can run as and reports, read from its source without running it, is held against the experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import Found, report_of

IMPORTS = """
import determined_ds, torch
from determined.pytorch import deepspeed
from determined.pytorch.deepspeed import DeepSpeedTrial
from determined_ds import DataParallelTrial, PipelineTrial, ReconciledTrial
"""
BESIDE = {
    "__init__": "from .inner import Base as Shown\n",
    "inner": f"{IMPORTS}class Base(PipelineTrial):\n    pass\n",
    "broken": "class Base(",
    "reducer": "def f(context): context.wrap_reducer(g)\n",
}


def found(folder: Path, source: str, metric: str = "validation_loss", **sections: Any) -> list[Found]:
    (folder / "pack").mkdir(exist_ok=True)
    for name, text in BESIDE.items():
        (folder / "pack" / f"{name}.py").write_text(text)
    searcher = {"name": "single", "metric": metric}
    every: list[Found] = report_of(folder, trial=IMPORTS + source, searcher=searcher, **sections)["findings"]
    return every


def trial(*body: str, base: str = "DataParallelTrial") -> str:
    return f"class T({base}):\n" + "".join(f"    {line}\n" for line in body or ("pass",))


WRONG, UNKNOWN = "metric", "metric-unknown"
LOSS = trial("def loss(self, model, batch):", "    return f(batch)")
TOP = ("def evaluate(self, *given):", "    return {'top1': 1, 'top5': 2}")
REDUCER = ("def prepare(self):", "    self.context.wrap_reducer(f, 'auc')")
TWO = f"class A(DataParallelTrial): pass\n{trial(*TOP).replace('class T', 'class B')}"


@pytest.mark.parametrize(
    ("source", "metric", "code"),
    [
        (LOSS, "validation_accuracy", UNKNOWN),  # a loss may be a mapping
        (LOSS, "accuracy", WRONG),
        (LOSS.replace("batch):", "batch) -> torch.Tensor:"), "validation_accuracy", WRONG),
        (LOSS.replace("f(batch)", "{'loss': 1, 'accuracy': 2}"), "validation_accuracy", None),
        (trial(base="PipelineTrial"), "validation_loss", None),
        (trial(*TOP), "top5", None),
        (trial("validation_metrics = ('f1', 'accuracy')"), "loss", WRONG),
        (trial("validation_metrics = {'auc': f, 'errors': 'sum'}"), "errors", None),
        (trial(*REDUCER), "auc", UNKNOWN),
        (trial("validation_metrics = ('auc',)", *REDUCER), "loss", WRONG),
        (trial("validation_metrics = ('auc',)", base="Unknown"), "loss", WRONG),
        (TWO + trial(base="A, B"), "loss", WRONG),
        # Other files are read
        ("from pack import Shown as T\n", "loss", WRONG),
        ("import pack.inner\n" + trial(base="pack.inner.Base"), "loss", WRONG),
        ("import pack.reducer\n" + trial(base="PipelineTrial"), "loss", UNKNOWN),
        ("from pack.broken import Base\n" + trial(base="Base"), "loss", UNKNOWN),
        # What the source does not show for sure.
        ("from pack.inner import *\n" + trial(base="Base"), "loss", UNKNOWN),
        (
            "try:\n    from pack import Shown as B\nexcept E:\n    B = object\n" + trial(base="B"),
            "loss",
            UNKNOWN,
        ),
        ("if FLAG:\n    class T(PipelineTrial): pass\nelse:\n    class T: pass\n", "loss", UNKNOWN),
        ("@registered\n" + trial(*TOP), "auc", UNKNOWN),
        (trial(base="Unknown, PipelineTrial"), "loss", UNKNOWN),
        (trial(base="PipelineTrial, metaclass=Meta"), "loss", UNKNOWN),
        (trial("validation_metrics = (NAME, 'f1')"), "auc", UNKNOWN),
        (trial("def prepare(self):", "    self.validation_metrics = ('auc',)"), "auc", UNKNOWN),
        (trial("def evaluate(self, *given):", "    return {**f(), 'a': 1}"), "b", UNKNOWN),
        (trial("@wrapped", *TOP), "auc", UNKNOWN),
        (trial("if FLAG:", *(f"    {line}" for line in TOP)), "auc", UNKNOWN),
        (trial(*TOP) + "T.evaluate = f\n", "auc", UNKNOWN),
        (trial(*TOP) + "setattr(T, *method)\n", "auc", UNKNOWN),
    ],
)
def test_the_metric_of_a_searcher_is_one_that_the_trial_reports(
    tmp_path: Path, source: str, metric: str, code: str | None
) -> None:
    """What its source does not show is a note, which says how to declare it."""
    metrics = [each for each in found(tmp_path, source, metric) if each.code.startswith("metric")]
    assert [(each.code, each.value) for each in metrics] == ([(code, metric)] if code else [])
    for each in metrics:
        assert each.severity == ("note" if code == UNKNOWN else "error")
        assert f'validation_metrics = ("{metric}",)' in each.fix or code == WRONG


@pytest.mark.parametrize(
    ("source", "key", "code"),
    [
        (trial(base="DataParallelTrial"), "pipe_parallel_size", "trial-kind"),
        (trial(base="determined_ds.SeveralEnginesTrial"), "pipe_parallel_size", "trial-kind"),
        (trial(base="ReconciledTrial, PipelineTrial"), "pipe_parallel_size", None),
        (trial(base="Unknown, DataParallelTrial"), "pipe_parallel_size", None),
        (trial(), "sequence_parallel_size", "sequence-trial"),
        (trial("sequence_parallel = False"), "sequence_parallel_size", "sequence-trial"),
        (trial("sequence_parallel: bool = True"), "sequence_parallel_size", None),
        # What is not shown is left to the ranks.
        (trial("sequence_parallel = f()"), "sequence_parallel_size", None),
        (trial(base="determined_ds.DeepSpeedTrial"), "sequence_parallel_size", None),
    ],
)
def test_what_a_trial_cannot_do_is_refused(tmp_path: Path, source: str, key: str, code: str | None) -> None:
    refused = {"trial-kind", "sequence-trial"}
    every = found(tmp_path, source, hyperparameters={key: 2})
    assert {each.code for each in every} & refused == ({code} if code else set())
    assert all(each.file.endswith("a.yaml") and each.line > 1 for each in every if each.code == code)
    assert not {each.code for each in found(tmp_path, source, hyperparameters={key: 1})} & refused


@pytest.mark.parametrize(
    ("named", "source", "said", "fix"),
    [
        ("trial:MyTrail", "class MyTrial: ...", "module trial has no MyTrail", "did you mean MyTrial?"),
        ("trail:T", "class T: ...", "has no module trail", "did you mean trial?"),
        ("trial:T", "import torch\nclass T(object)", "trial.py:2 is not Python", "fix trial.py:2"),
        # It may well be there
        ("trial:T", "from elsewhere import *\n", "", ""),
        ("trial:T", "def __getattr__(name):\n    return object", "", ""),
        ("trial:T", "globals()[name] = object\n", "", ""),
        ("trial:T", f"class T: ...\nx = {' + '.join(['1'] * 3000)}\n", "", ""),  # too deep for a walk
    ],
)
def test_a_trial_that_is_not_there_is_named_with_what_is(
    tmp_path: Path, named: str, source: str, said: str, fix: str
) -> None:
    report = report_of(tmp_path, trial=source, entrypoint=f"python3 -m determined_ds.train {named}")
    errors = [each for each in report["findings"] if each.severity == "error"]
    assert [(each.key, each.fix) for each in errors] == ([("entrypoint", fix)] if said else [])
    assert all(said in each.message for each in errors)


OWN = "from determined.pytorch import deepspeed as d\n"
OURS_FIRST = f"try:\n    from determined_ds import deepspeed as d\nexcept ImportError:\n    {OWN}d.init()\n"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (OWN + "if __name__ == '__main__':\n    d.init()\n", "determined-own"),
        (f"def f():\n    {OWN}    d.Trainer()\n", "determined-own"),
        ("# coding: latin-1\nx = '\xff'\n", ""),
        ("import __main__\n", ""),
        (f"import os\nif os.environ.get('X'):\n    {OWN}    d.init()\n", ""),
        (OURS_FIRST, ""),
    ],
)
def test_of_a_script_is_said_what_is_certain(tmp_path: Path, script: str, code: str) -> None:
    (tmp_path / "train.py").write_bytes(script.encode("latin-1"))
    every = report_of(tmp_path, entrypoint="python3 train.py")["findings"]
    said = {each.code for each in every if each.severity != "note" and each.key in ("", "entrypoint")}
    assert said == ({code} if code else set())
