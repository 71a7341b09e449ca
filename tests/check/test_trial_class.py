"""What a trial can run as and reports, read from its source: held against the experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds.check.trial_class import (
    ReportedMetrics,
    builds_engine_by_hand,
    has_stages,
    metric_problem,
    metric_unknown,
    optimizer_problem,
    reported_metrics,
    scheduler_problem,
    slices_problem,
    stages_problem,
)
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from tests.command import ROOT
from tests.making import decide

IMPORT = "from determined_ds import DataParallelTrial, PipelineTrial, ReconciledTrial\nimport determined_ds\n"
LOSS = "    def loss(self, model, batch){}:\n        return {}\n"


def known(folder: Path, source: str, trial: str = "trial:T") -> ReportedMetrics | None:
    (folder / "trial.py").write_text(IMPORT + source)
    return reported_metrics(trial, folder)


SOURCES = {
    "a loss that may be a dict": (
        "class T(DataParallelTrial):\n" + LOSS.format("", "f(batch)"),
        ReportedMetrics(names=("validation_loss",), prefix="validation_"),
    ),
    "a loss that says it is a tensor": (
        "class T(determined_ds.DataParallelTrial):\n" + LOSS.format(" -> torch.Tensor", "f(batch)"),
        ReportedMetrics(names=("validation_loss",)),
    ),
    "a loss with more metrics": (
        "class T(DataParallelTrial):\n" + LOSS.format("", "{'loss': 1, 'accuracy': 2}"),
        ReportedMetrics(names=("validation_loss", "validation_accuracy")),
    ),
    "a pipeline": ("class T(PipelineTrial):\n    pass\n", ReportedMetrics(names=("validation_loss",))),
    "evaluate": (
        "class T(DataParallelTrial):\n    def evaluate(self, model, batch):\n"
        "        def inner():\n            return 3\n        return {'top1': inner(), 'top5': 2}\n",
        ReportedMetrics(names=("top1", "top5")),
    ),
    "a DeepSpeedTrial by itself": (
        "class T(determined_ds.DeepSpeedTrial):\n    def evaluate_batch(self, it, idx):\n"
        "        return {'my_loss': 1}\n",
        ReportedMetrics(names=("my_loss",)),
    ),
    "declared with reductions, beside evaluate": (
        "class T(DataParallelTrial):\n    validation_metrics = {'auc': f, 'errors': 'sum'}\n"
        "    def evaluate(self, model, batch):\n        return {'auc': g(batch), 'other': 1, 'errors': 2}\n",
        ReportedMetrics(names=("auc", "other", "errors")),
    ),
    "declared with reductions, beside what is not shown": (
        "class T(DataParallelTrial):\n    validation_metrics = {'auc': f}\n"
        "    def evaluate(self, model, batch):\n        return self.metrics(batch)\n",
        ReportedMetrics(names=("auc",), prefix=""),
    ),
    "declared": (
        "class T(DataParallelTrial):\n    validation_metrics = ('f1', 'accuracy')\n"
        "    def evaluate(self, model, batch):\n        return self.metrics(batch)\n",
        ReportedMetrics(names=("f1", "accuracy")),
    ),
    "declared with a type, on a base": (
        "class B(DataParallelTrial):\n    validation_metrics: tuple = ('f1',)\nclass T(B):\n    pass\n",
        ReportedMetrics(names=("f1",)),
    ),
    "a mixin first": (
        "class M(ReconciledTrial):\n    pass\nclass T(M, PipelineTrial):\n    pass\n",
        ReportedMetrics(names=("validation_loss",)),
    ),
    "a dictionary made elsewhere": (
        "class T(DataParallelTrial):\n    def evaluate(self, model, batch):\n        return make(batch)\n",
        None,
    ),
    "keys that are computed": (
        "class T(DataParallelTrial):\n    def evaluate(self, model, batch):\n        return {NAME: 1}\n",
        None,
    ),
    "a reducer": (
        "class T(DataParallelTrial):\n    def prepare(self):\n        self.context.wrap_reducer(f, 'auc')\n",
        None,
    ),
    "a reducer, declared": (
        "class T(DataParallelTrial):\n    validation_metrics = ('auc',)\n    def prepare(self):\n"
        "        self.context.wrap_reducer(f, 'auc')\n",
        ReportedMetrics(names=("auc",)),
    ),
    "a base of nobody's": ("class T(Unknown):\n    pass\n", None),
    "a base of itself": ("class T(T):\n    pass\n", None),
    "no such class": ("", None),
    "not Python": ("class T(:\n", None),
}


@pytest.mark.parametrize(("source", "expected"), SOURCES.values(), ids=SOURCES.keys())
def test_what_the_source_tells(tmp_path: Path, source: str, expected: ReportedMetrics | None) -> None:
    assert known(tmp_path, source) == expected


THEIRS = "from determined.pytorch.deepspeed import DeepSpeedTrial\nfrom determined.pytorch import deepspeed\n"
BY_HAND = {
    "class T(DeepSpeedTrial):\n    pass\n": True,
    "class T(deepspeed.DeepSpeedTrial):\n    pass\n": True,
    "class T(determined_ds.DeepSpeedTrial):\n    pass\n": True,
    "class B(DeepSpeedTrial):\n    pass\nclass T(B):\n    pass\n": True,
    "class T(DataParallelTrial):\n    pass\n": False,
    "class T(determined_ds.SeveralEnginesTrial):\n    pass\n": False,
    "class T(Unknown):\n    pass\n": None,
    "T = made()\n": None,
}


@pytest.mark.parametrize(("source", "expected"), BY_HAND.items())
def test_who_makes_the_engine(tmp_path: Path, source: str, expected: bool | None) -> None:
    """A class of this library, or the trial itself; None where the source does not show it."""
    (tmp_path / "trial.py").write_text(IMPORT + THEIRS + source)
    assert builds_engine_by_hand("trial:T", tmp_path) is expected


def test_bases_in_other_files_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import Base as Shown\n")
    (package / "inner.py").write_text(IMPORT + "class Base(PipelineTrial):\n    pass\n")
    assert known(tmp_path, "import pack\nclass T(pack.Shown):\n    pass\n")
    assert known(tmp_path, "from pack import Shown\nclass T(Shown):\n    pass\n")
    assert known(tmp_path, "from pack.inner import Base\nT = 3\n", "pack:Shown")


@pytest.mark.parametrize("trial", ["GPT2Trial", "GPT2PipelineTrial"])
@pytest.mark.parametrize(
    ("metric", "fix"),
    [("validation_loss", None), ("val_loss", "write validation_loss"), ("accuracy", "write validation_loss")],
)
def test_the_metric_of_the_templates(trial: str, metric: str, fix: str | None) -> None:
    document = parse_yaml(f"name: x\nsearcher:\n  name: single\n  metric: {metric}\n", "e.yaml")
    problem = metric_problem(document, f"model_defs.gpt2.trial:{trial}", ROOT)
    assert (problem.fix if problem else None) == fix
    if problem:
        assert problem.origin == "e.yaml:4"


def test_a_metric_that_a_trial_may_report_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(IMPORT + SOURCES["a loss that may be a dict"][0])
    document = parse_yaml("searcher: {metric: validation_accuracy}\n", "e.yaml")
    assert metric_problem(document, "trial:T", tmp_path) is None
    document = parse_yaml("searcher: {metric: accuracy}\n", "e.yaml")
    assert metric_problem(document, "trial:T", tmp_path) is not None


@pytest.mark.parametrize(
    ("source", "metric", "is_known"),
    [
        (SOURCES["a loss that may be a dict"][0], "validation_accuracy", False),
        (SOURCES["a loss that may be a dict"][0], "validation_loss", True),
        (SOURCES["a loss that may be a dict"][0], "accuracy", True),
        (SOURCES["a reducer"][0], "auc", False),
        (SOURCES["a reducer, declared"][0], "auc", True),
        (SOURCES["keys that are computed"][0], "loss", False),
        (SOURCES["a pipeline"][0], "loss", True),
        ("from elsewhere import T", "loss", False),
    ],
)
def test_a_metric_that_cannot_be_checked_is_a_note(
    tmp_path: Path, source: str, metric: str, is_known: bool
) -> None:
    (tmp_path / "trial.py").write_text(IMPORT + source)
    document = parse_yaml(f"searcher: {{metric: {metric}}}\n", "e.yaml")
    note = metric_unknown(document, "trial:T", tmp_path)
    assert (note is None) == is_known
    if note:
        assert (note.key, note.value, note.origin) == ("searcher.metric", metric, "e.yaml:1")
        assert note.message.startswith("could not check whether T reports it")
        assert f'validation_metrics = ("{metric}",)' in note.fix


OPTIMIZER = (
    "class B(DataParallelTrial):\n    def build_optimizer(self, model):\n        return {}\n"
    "class T(B):\n    pass\n"
)
ON_ZERO = {"zero_optimization": {"stage": 2}}
ON_CPU = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
UNTESTED, FORCED = {"zero_allow_untested_optimizer": True}, {"zero_force_ds_cpu_optimizer": False}


@pytest.mark.parametrize(
    ("imports", "returned", "ds", "said"),
    [
        ("import torch", "torch.optim.SGD(model.parameters(), lr=1)", ON_ZERO, "SGD, and ZeRO stage 2 accepts"),
        ("from torch import optim", "optim.SGD(model.parameters())", ON_ZERO, "torch.optim.SGD"),
        ("from torch.optim import RAdam as R", "R(model.parameters())", ON_ZERO, "torch.optim.RAdam"),
        ("import torch", "torch.optim.AdamW(model.parameters())", ON_CPU, "must be DeepSpeed's own"),
        ("import torch", "torch.optim.AdamW(model.parameters())", {**ON_CPU, **FORCED}, None),
        ("import torch", "torch.optim.AdamW(model.parameters())", ON_ZERO, None),
        ("import torch", "torch.optim.SGD(model.parameters())", {**ON_ZERO, **UNTESTED}, None),
        ("import torch", "torch.optim.SGD(model.parameters())", {}, None),
        ("from mine import SGD", "SGD(model.parameters())", ON_ZERO, None),
        ("import torch", "make(model)", ON_ZERO, None),
        ("import torch", "None", ON_ZERO, None),
    ],
)  # fmt: skip
def test_an_optimizer_of_the_trial_that_zero_refuses(
    tmp_path: Path, imports: str, returned: str, ds: dict[str, Any], said: str | None
) -> None:
    (tmp_path / "trial.py").write_text(f"{IMPORT}{imports}\n{OPTIMIZER.format(returned)}")
    problem = optimizer_problem("trial:T", tmp_path, decide("global_batch_size: 2", ds))
    assert (problem is None) == (said is None)
    if problem and said:
        assert said in problem.message
        assert problem.origin == f"{tmp_path / 'trial.py'}:6"


@pytest.mark.parametrize(
    ("returned", "scheduler", "refused"),
    [
        ("torch.optim.lr_scheduler.StepLR(optimizer, 2)", {"type": "WarmupLR"}, True),
        ("self.mine(optimizer)", {"type": "WarmupLR"}, True),
        ("None", {"type": "WarmupLR"}, False),
        ("self.mine(optimizer)", None, False),
    ],
)
def test_a_schedule_of_the_trial_beside_one_in_the_json(
    tmp_path: Path, returned: str, scheduler: dict[str, Any] | None, refused: bool
) -> None:
    method = f"    def build_scheduler(self, optimizer):\n        return {returned}\n"
    source = f"{IMPORT}class Base(DataParallelTrial):\n{method}class T(Base):\n    pass\n"
    (tmp_path / "trial.py").write_text(source)
    ds: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    ds |= {"scheduler": scheduler} if scheduler else {}
    problem = scheduler_problem("trial:T", tmp_path, decide("global_batch_size: 2", ds))
    assert (problem is not None) == refused
    if problem:
        assert problem.origin == f"{tmp_path / 'trial.py'}:4"


@pytest.mark.parametrize(
    ("source", "stages"),
    [
        ("class T(DataParallelTrial):\n    pass\n", False),
        ("class T(determined_ds.SeveralEnginesTrial):\n    pass\n", False),
        ("class T(ReconciledTrial, PipelineTrial):\n    pass\n", True),
        ("class T(ReconciledTrial):\n    pass\n", None),
        ("class T(Unknown):\n    pass\n", None),
    ],
)
def test_whether_a_trial_has_stages(tmp_path: Path, source: str, stages: bool | None) -> None:
    (tmp_path / "trial.py").write_text(IMPORT + source)
    assert has_stages("trial:T", tmp_path) is stages


@pytest.mark.parametrize(("stages", "refused"), [(None, False), ("auto", False), (1, False), (2, True)])
def test_a_pipeline_needs_a_trial_with_stages(stages: int | str | None, refused: bool) -> None:
    document = Document(name="e.yaml", data={"pipe_parallel_size": stages}, prefix="hyperparameters")
    problem = stages_problem(document, "trial:T")
    assert (problem is not None) == refused


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("class T(DataParallelTrial):\n    pass\n", True),
        ("class T(DataParallelTrial):\n    sequence_parallel = False\n", True),
        ("class T(DataParallelTrial):\n    sequence_parallel: bool = True\n", False),
        ("class B(DataParallelTrial):\n    sequence_parallel = True\nclass T(B):\n    pass\n", False),
        # What is not shown is left to the ranks.
        ("class T(DataParallelTrial):\n    sequence_parallel = f()\n", False),
        (
            "class T(DataParallelTrial):\n    def __init__(self, c):\n        self.sequence_parallel = f()\n",
            False,
        ),
        ("from elsewhere import B\nclass T(B):\n    pass\n", False),
        ("class T(determined_ds.DeepSpeedTrial):\n    pass\n", False),
    ],
)
def test_a_trial_that_computes_on_whole_sequences_gets_no_slices(
    tmp_path: Path, source: str, refused: bool
) -> None:
    (tmp_path / "trial.py").write_text(IMPORT + source)
    split = decide({"global_batch_size": 2, "sequence_parallel_size": 2})
    stated = parse_yaml("global_batch_size: 2\nulysses_size: 2\n", "own.yaml")
    problem = slices_problem(stated, "trial:T", tmp_path, split)
    assert (problem is not None) == refused
    if problem:
        assert str(problem.origin) == "ulysses_size, own.yaml:2"
    assert slices_problem(stated, "trial:T", tmp_path, decide("global_batch_size: 2")) is None
