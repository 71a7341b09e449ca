"""On a terminal a Trainer shows this library's panel in place of its own bars; elsewhere what it shows itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers

from determined_ds.documents.document import Document
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.runtime.loop.live_panel import LivePanel
from determined_ds.runtime.loop.progress import Progress
from determined_ds.runtime.scripts.given_run import Measurement, ScriptRun
from determined_ds.transformers.in_place_of_bars import panel_for_trainer


def run_in(folder: Path, measurement: Measurement | None = None) -> ScriptRun:
    data = {"name": "x", "entrypoint": "python3 train.py", "searcher": {"name": "single"}}
    experiment = parse_experiment(Document(name="x", data=data))
    return ScriptRun(run_dir=folder, experiment=experiment, measurement=measurement)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    # Restored at the end of the test.
    monkeypatch.setattr(
        transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", transformers.trainer.DEFAULT_PROGRESS_CALLBACK
    )


def callbacks_of_a_trainer(folder: Path) -> list[type]:
    # Its default depends on the level that transformers logs at.
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=False
    )
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=8)
    trainer = transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=arguments)
    return [type(callback) for callback in trainer.callback_handler.callbacks]


def test_a_trainer_has_no_bars_beside_the_panel(tmp_path: Path) -> None:
    assert transformers.ProgressCallback in callbacks_of_a_trainer(tmp_path)
    assert isinstance(panel_for_trainer(run_in(tmp_path), is_chief=True), LivePanel)
    assert transformers.ProgressCallback not in callbacks_of_a_trainer(tmp_path)


@pytest.mark.parametrize("why", ["no terminal", "another rank", "measured", "no run of ours"])
def test_elsewhere_its_own_bars_stay(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no terminal":
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    measurement = Measurement(steps=3, warmup=1) if why == "measured" else None
    run = None if why == "no run of ours" else run_in(tmp_path, measurement)
    assert type(panel_for_trainer(run, is_chief=why != "another rank")) is Progress
    assert transformers.ProgressCallback in callbacks_of_a_trainer(tmp_path)
