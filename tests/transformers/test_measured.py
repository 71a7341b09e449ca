"""``det-ds run --measure`` of a script of transformers: it trains as ever, and its steps are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from determined_ds.errors import EXIT_CONFIG, ConfigError
from determined_ds.experiment.experiment import load_experiment
from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.run_dir import STEP_GROUP, RunDir
from determined_ds.report.results import Row, read_row
from determined_ds.runtime.scripts import given_run
from determined_ds.runtime.scripts.given_run import Measurement, ScriptRun
from determined_ds.transformers import DetCallback, Trainer
from tests.command import ROOT, det_ds
from tests.transformers.test_callback import Data, Reports, arguments, trial  # noqa: F401 - trial is a fixture
from tests.transformers.test_resume import NUM_BATCHES, experiment
from tests.transformers.victim import LENGTH

HF_TRAINER = ROOT / "experiments/hf_trainer/const.yaml"
WARMUP, STEPS = 2, 3
MEASURED = ("--measure", str(STEPS), "--warmup", str(WARMUP))


def written(folder: Path, zero_stage: int, **fit: Any) -> Path:
    config = experiment(zero_stage)
    once = {
        "validation_period": {"batches": NUM_BATCHES}
    }  # the loader of an evaluation draws from the generator
    config["hyperparameters"]["fit"].update({"reporting_period": {"batches": 1}, **once, **fit})
    path = folder / "victim.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measured(config: Path, run_dir: Path, *options: str) -> Row:
    done = det_ds("run", config, ROOT, "--run-dir", run_dir, *MEASURED, *options)
    assert done.returncode == 0, done.stderr
    return read_row(RunDir(run_dir).measured)


STAGES = [1, *(pytest.param(stage, marks=pytest.mark.long("ZeRO 1 is the short one")) for stage in (0, 2, 3))]


@pytest.mark.parametrize("zero_stage", STAGES)
def test_its_losses_are_those_of_an_ordinary_run_to_the_bit(zero_stage: int, tmp_path: Path) -> None:
    """Which saves on its way, and trains longer: with dropout, accumulation and a schedule."""
    config = written(tmp_path, zero_stage)
    row = measured(config, tmp_path / "measured")
    done = det_ds("run", config, ROOT, "--run-dir", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    whole = read_records(RunDir(tmp_path / "whole").metrics, "training")
    assert list(row.losses) == [each["metrics"]["loss"] for each in whole][: WARMUP + STEPS]
    assert row.is_measured
    assert (row.engine, row.slots, row.zero_stage, row.precision) == ("deepspeed", 2, zero_stage, "fp32")
    assert (row.micro_batch_size, row.accumulation, row.replicas, row.samples_per_step) == (2, 2, 2, 8)
    assert row.tokens_per_sample == LENGTH
    [repetition] = row.repetitions
    assert (len(repetition.step_seconds), repetition.warmup) == (STEPS, WARMUP)
    assert len(repetition.peak_memory_bytes_by_rank) == 2
    assert min(repetition.model_state_bytes_by_rank) > 0
    steps = read_records(RunDir(tmp_path / "measured").metrics, STEP_GROUP)
    assert [each["steps_completed"] for each in steps] == list(range(1, WARMUP + STEPS + 1))
    assert [
        *(tmp_path / "measured").glob("checkpoints/*"),
        *(tmp_path / "measured").rglob("checkpoint-*"),
    ] == []


@pytest.mark.long("test_its_losses_are_those_of_an_ordinary_run_to_the_bit with a smaller model")
def test_the_experiment_is_measured_under_zero_1_and_2(tmp_path: Path) -> None:
    rows = {}
    for stage in (1, 2):
        rows[stage] = measured(
            HF_TRAINER, tmp_path / f"zero{stage}", "--set", f"hyperparameters.zero_stage={stage}"
        )
        assert (rows[stage].zero_stage, rows[stage].tokens_per_sample) == (stage, 128)
        assert rows[stage].tokens_per_second is not None
    assert rows[2].losses == pytest.approx(rows[1].losses, rel=1e-4)
    assert (rows[2].model_state_bytes or 0) < (rows[1].model_state_bytes or 0)


@pytest.mark.long("a run for each of two ways to be too short")
def test_a_training_that_is_too_short_is_made_longer_in_steps_and_refused_in_epochs(tmp_path: Path) -> None:
    assert measured(written(tmp_path, 1, max_length={"batches": 3}), tmp_path / "steps").is_measured
    config = written(tmp_path, 1, max_length={"epochs": 1})
    done = det_ds("run", config, ROOT, "--run-dir", tmp_path / "epochs", "--measure", "4", "--warmup", "2")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "the script trains only 5 of 6 steps" in done.stderr


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trial: Any) -> None:  # noqa: F811 - the fixture
    """Says that this process is a rank of a script that is measured."""
    trial({"metric": "eval_loss"})
    path, length = tmp_path / "experiment.yaml", Measurement(steps=STEPS, warmup=WARMUP)
    path.write_text("{name: small, entrypoint: python3 train.py, hyperparameters: {width: 8}}")
    run = ScriptRun(run_dir=tmp_path, experiment=load_experiment(path), measurement=length)
    monkeypatch.setattr(given_run, "_run", run)


@pytest.mark.usefixtures("measuring")
def test_arguments_that_do_not_take_the_hyperparameters_are_refused(tmp_path: Path) -> None:
    """The row would be named by a strategy that did not train."""
    with pytest.raises(ConfigError, match=r"from determined_ds\.transformers import TrainingArguments"):
        DetCallback(Reports(), arguments(tmp_path))


@pytest.mark.usefixtures("measuring")
def test_a_trainer_without_the_callback_is_refused_before_it_trains(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=8, num_key_value_heads=1, **sizes)
    )
    with pytest.raises(ConfigError, match="needs a DetCallback"):
        Trainer(model=model, args=arguments(tmp_path), train_dataset=Data(), eval_dataset=Data()).train()
