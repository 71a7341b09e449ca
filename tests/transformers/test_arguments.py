"""``TrainingArguments`` takes the hyperparameters of its trial, however it is made."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import determined as det
import pytest
import transformers

from determined_ds.errors import ConfigError
from determined_ds.experiment.experiment import load_experiment
from determined_ds.runtime.scripts import given_run as script_run
from determined_ds.transformers import Seq2SeqTrainingArguments, TrainingArguments

DS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
}
Trial = Callable[..., None]


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Says that this process is the one rank of a trial with these hyperparameters."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def of(hparams: dict[str, Any], *, slots: int = 1, **searcher: Any) -> None:
        config = {"searcher": {"name": "single", **searcher}, "resources": {"slots_per_trial": slots}}
        found = SimpleNamespace(hparams=hparams, _config=config, trial_seed=11, _steps_completed=0)
        info = SimpleNamespace(task_type="TRIAL", latest_checkpoint=None, trial=found)
        monkeypatch.setattr(det, "get_cluster_info", lambda: info)

    return of


def codes(error: ConfigError) -> dict[str, str]:
    return {problem.key: problem.code for problem in error.problems}


HPARAMS = {"global_batch_size": 6, "deepspeed_config": DS, "learning_rate": 0.1, "warmup_num_steps": 4}


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments])
def test_it_is_filled_and_so_is_the_json(trial: Trial, tmp_path: Path, kind: type, capfd: Any) -> None:
    trial(
        {**HPARAMS, "fit": {"max_length": {"batches": 9}, "validation_period": {"batches": 3}}},
        metric="eval_f1",
    )
    args = kind(output_dir=str(tmp_path), gradient_accumulation_steps=3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 3)
    assert (args.max_steps, args.eval_steps, args.seed, args.use_cpu) == (9, 3, 11, True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_f1", False)
    params = args.hf_deepspeed_config.config["scheduler"]["params"]
    assert params == {"warmup_min_lr": 0.025, "warmup_max_lr": 0.1, "warmup_num_steps": 4}
    assert "warmup_min_lr = 0.025" in capfd.readouterr().out  # transformers alone would begin at 0
    assert args.resolved.batch.global_batch_size == 6
    assert not hasattr(pickle.loads(pickle.dumps(args)), "_stated")  # as training_args.bin is read elsewhere


def test_a_section_of_the_hyperparameters_states_any_argument(trial: Trial, tmp_path: Path) -> None:
    trial({**HPARAMS, "training_arguments": {"label_smoothing_factor": "1e-2", "seed": 3}})
    args = TrainingArguments(output_dir=str(tmp_path))
    assert (args.label_smoothing_factor, args.seed) == (0.01, 3)
    trial({**HPARAMS, "training_arguments": {"label_smoothing": 0.1}})
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir=str(tmp_path))
    assert codes(caught.value) == {"hyperparameters.training_arguments.label_smoothing": "unknown-key"}


def test_it_is_made_by_a_parser_of_command_lines(trial: Trial, tmp_path: Path) -> None:
    """Which hands on every argument: those at their default are not stated."""
    trial(HPARAMS)
    parser = transformers.HfArgumentParser(TrainingArguments)
    [args] = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--weight_decay", "0.1"])
    assert (args.learning_rate, args.weight_decay) == (0.1, 0.1)
    with pytest.raises(ConfigError) as caught:
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--learning_rate", "0.2"])
    assert codes(caught.value) == {"TrainingArguments.learning_rate": "stated-twice"}


def test_the_json_may_be_an_argument_but_not_another_one(trial: Trial, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DS))
    trial({"learning_rate": 0.1})
    args = TrainingArguments(output_dir=str(tmp_path), deepspeed=str(file), per_device_train_batch_size=5)
    assert args.hf_deepspeed_config.config["train_batch_size"] == 5
    trial({**HPARAMS, "deepspeed_config": {"zero_optimization": {"stage": 2}}})
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir=str(tmp_path), deepspeed=str(file))
    assert codes(caught.value) == {"TrainingArguments.deepspeed": "stated-twice"}


def test_ranks_that_were_not_started_are_refused(trial: Trial, tmp_path: Path) -> None:
    trial(HPARAMS, slots=2)
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir=str(tmp_path))
    assert codes(caught.value) == {"resources.slots_per_trial": "ranks"}


def test_without_a_trial_it_is_that_of_transformers(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.resolved is None
    assert args.learning_rate == transformers.TrainingArguments.learning_rate


def test_a_relative_folder_is_one_of_the_run_directory(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial(HPARAMS)
    config = tmp_path / "experiment.yaml"
    config.write_text(
        "{name: script, entrypoint: python3 train.py, searcher: {name: single, metric: eval_loss}}"
    )
    run = script_run.ScriptRun(
        run_dir=tmp_path / "run", experiment=load_experiment(config), accelerator="cpu"
    )
    monkeypatch.setattr(script_run, "_run", run)
    assert TrainingArguments(output_dir="out").output_dir == str(tmp_path / "run" / "out")
    assert TrainingArguments(output_dir=str(tmp_path)).output_dir == str(tmp_path)
