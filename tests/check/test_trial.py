"""What an entrypoint names, read from its source without running it, is held against the whole experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checked import report_of

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
}


def trial(*body: str, base: str = "DataParallelTrial") -> str:
    return f"class T({base}):\n" + "".join(f"    {line}\n" for line in body or ("pass",))


LOSS = trial("def loss(self, model, batch):", "    return f(batch)")
REDUCER = ("def prepare(self):", "    self.context.wrap_reducer(f, 'auc')")
METRIC, PIPED = "searcher.metric", "hyperparameters.pipe_parallel_size"
# What is found -> sources, and what their experiment says.
CASES: dict[str, list[tuple[str, str]]] = {
    "": [
        (LOSS.replace("f(batch)", "{'loss': 1, 'accuracy': 2}"), f"{METRIC}=validation_accuracy"),
        (trial(base="PipelineTrial"), f"{METRIC}=validation_loss"),
        # What the source does not show for sure.
        (LOSS, f"{METRIC}=validation_accuracy"),  # a loss may be a mapping
        ("from pack.broken import Base\n" + trial(base="Base"), f"{METRIC}=loss"),
        (trial("validation_metrics = (NAME, 'f1')"), f"{METRIC}=auc"),
    ],
    "trial-kind": [(trial(base="determined_ds.SeveralEnginesTrial"), f"{PIPED}=2")],
    "metric": [
        (LOSS, f"{METRIC}=accuracy"),
        (trial("validation_metrics = ('auc',)", *REDUCER), f"{METRIC}=loss"),
        # Other files are read.
        ("from pack import Shown as T\n", f"{METRIC}=loss"),
    ],
}


@pytest.mark.parametrize(
    ("code", "source", "asked"), [(code, *row) for code, rows in CASES.items() for row in rows]
)
def test_what_is_asked_of_a_trial_it_reports_and_can_do(
    tmp_path: Path, code: str, source: str, asked: str
) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in BESIDE.items():
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    every = report_of(tmp_path, trial=IMPORTS + source, options=("--set", asked))["findings"]
    key = asked.partition("=")[0]
    found = [each for each in every if each.key == key and each.code != "search-direction"]
    assert [(each.code, each.origin) for each in found] == [(code, f"--set {asked}")] * bool(code)
    for each in found:
        assert each.severity == "error"


@pytest.mark.parametrize(
    ("entrypoint", "source", "said"),
    [
        ("trial:MyTrail", "class MyTrial: ...", "module trial has no MyTrail; it has: MyTrial"),
        ("trail:T", "class T: ...", "the context directory has no module trail; is"),
        ("trial:T", "import torch\nclass T(object)", "trial.py:2 is not Python"),
        ("trial:T", "from elsewhere import *\n", ""),  # it may well be there
        ("trial.py", "from determined.pytorch import deepspeed as d\nd.init()\n", "determined-own"),
    ],
)
def test_what_an_entrypoint_names_is_there_and_can_run(
    tmp_path: Path, entrypoint: str, source: str, said: str
) -> None:
    command = f"python3 {'-m determined_ds.train ' * (':' in entrypoint)}{entrypoint}"
    every = report_of(tmp_path, trial=source, entrypoint=command)["findings"]
    found = [each for each in every if each.severity != "note" and each.key in ("", "entrypoint")]
    assert len(found) == bool(said)
    assert all(said in f"{each.code}: {each.message}; {each.fix}" for each in found)
