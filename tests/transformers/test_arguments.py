"""``TrainingArguments`` takes the hyperparameters of its trial, however it is made."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import ConfigError
from determined_ds.transformers import Seq2SeqTrainingArguments, TrainingArguments

DS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
}
Trial = Callable[..., None]
HPARAMS = {"global_batch_size": 6, "deepspeed_config": DS, "learning_rate": 0.1, "warmup_num_steps": 4}


def test_it_is_filled_and_so_is_the_json(trial: Trial, tmp_path: Path) -> None:
    fit = {"max_length": {"batches": 9}, "validation_period": {"batches": 3}}
    trial({**HPARAMS, "fit": fit}, metric="eval_f1")
    args = Seq2SeqTrainingArguments(output_dir=str(tmp_path), gradient_accumulation_steps=3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 3)
    assert (args.max_steps, args.eval_steps, args.seed, args.use_cpu) == (9, 3, 11, True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_f1", False)
    optimizer = args.hf_deepspeed_config.config["optimizer"]["params"]
    assert optimizer["torch_adam"] is True  # DeepSpeed's own would be compiled at the first step
    params = args.hf_deepspeed_config.config["scheduler"]["params"]
    assert params == {"warmup_min_lr": 0.025, "warmup_max_lr": 0.1, "warmup_num_steps": 4}
    assert args.resolved.batch.global_batch_size == 6
    pickle.dumps(args)  # training_args.bin of a checkpoint


def test_the_experiment_overrides_what_the_script_states_and_says_so(
    trial: Trial, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However the arguments are made; what nobody states in the experiment stays the script's."""
    trial({**HPARAMS, "fit": {"max_length": {"batches": 5}}})
    words = f"--output_dir {tmp_path} --learning_rate 0.2 --max_steps 6 --weight_decay 0.1"
    [args] = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words.split())
    assert (args.learning_rate, args.max_steps, args.weight_decay) == (0.1, 5, 0.1)
    said = re.findall(r"TrainingArguments.(\w+) = (\S+) is not used", caplog.text)
    assert sorted(said) == [("learning_rate", "0.2"), ("max_steps", "6")]


def test_the_json_may_be_an_argument_and_any_argument_a_hyperparameter(trial: Trial, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DS))
    trial({"learning_rate": 0.1, "training_arguments": {"label_smoothing_factor": "1e-2", "seed": 3}})
    args = TrainingArguments(output_dir=str(tmp_path), deepspeed=str(file), per_device_train_batch_size=5)
    assert args.hf_deepspeed_config.config["train_batch_size"] == 5
    assert (args.label_smoothing_factor, args.seed) == (0.01, 3)


# --------------------------------------------------------------------------------------- "auto", filled by both

# Any of the keys of a mapping, each with one of the values in its list.
POOLS = yaml.safe_load("""
ds:
  train_batch_size: [auto, 1, 2, 4, 8, 16]
  train_micro_batch_size_per_gpu: [auto, 1, 2, 4, 8, 16]
  gradient_accumulation_steps: [auto, 1, 2, 4]
  gradient_clipping: [auto, 0.5]
  bf16: {enabled: [auto, true, false]}
  fp16: {enabled: [auto]}
  zero_optimization:
    stage: [0, 1, 2, 3]
    reduce_bucket_size: [auto]
    stage3_prefetch_bucket_size: [auto]
    stage3_param_persistence_threshold: [auto]
  optimizer:
    type: [AdamW, Adam]
    params: {lr: [auto, 0.001, 0.5], betas: [auto, [0.9, 0.95]], eps: [auto, 0.001], weight_decay: [auto, 0.1]}
  scheduler:
    type: [WarmupLR, WarmupDecayLR, WarmupCosineLR]
    params: {warmup_min_lr: [auto, 0.0], warmup_max_lr: [auto, 0.003], warmup_num_steps: [auto, 5],
      total_num_steps: [auto]}
hparams: {global_batch_size: [1, 2, 4, 8, 16], learning_rate: [0.001, 0.5], weight_decay: [0.01],
  betas: [[0.8, 0.9]], warmup_num_steps: [1, 7], gradient_clipping: [2.0], zero_stage: [0, 1, 2, 3],
  fit: [{max_length: {batches: 50}}, {max_length: {epochs: 2}}]}
stated: {per_device_train_batch_size: [1, 2, 4, 8, 16], gradient_accumulation_steps: [1, 2, 4],
  learning_rate: [0.001, 0.5], weight_decay: [0.01], adam_beta1: [0.7], adam_epsilon: [0.01],
  max_grad_norm: [2.0, 0.5], warmup_steps: [1, 7, 0.1], max_steps: [50], num_train_epochs: [1.0, 1.5]}
""")


def some(pools: Any) -> Any:
    if isinstance(pools, list):
        return st.sampled_from(pools)
    drawn = {key: some(pool) for key, pool in pools.items()}
    return st.fixed_dictionaries({"type": drawn.pop("type")} if "type" in drawn else {}, optional=drawn)


@given(**{name: some(pools) for name, pools in POOLS.items()})
def test_transformers_fills_what_is_left_open_and_finds_no_mismatch(
    trial: Trial, tmp_path: Path, caplog: pytest.LogCaptureFixture, ds: Any, hparams: Any, stated: Any
) -> None:
    """Whoever states a value; what is refused is named with a fix."""
    caplog.clear()
    trial({**hparams, "deepspeed_config": ds}, metric="eval_loss")
    try:
        args = TrainingArguments(output_dir=str(tmp_path), **stated)
    except ConfigError as error:
        if all(problem.key and problem.fix for problem in error.problems):
            return
        raise
    given_to_deepspeed = args.hf_deepspeed_config
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * 25)
    decided = {path for path, value in leaves(given_to_deepspeed.config) if value != "auto"}
    given_to_deepspeed.trainer_config_finalize(args, model, steps)  # where it finds a mismatch, it raises
    for path, value in leaves(given_to_deepspeed.config):
        assert value != "auto", path
        assert path not in decided or args.resolved.ds.get(path) in (value, None), path
    for name, value in stated.items():  # nothing that differs from its default is lost in silence
        is_default = getattr(transformers.TrainingArguments, name) == value
        is_said = f"TrainingArguments.{name} = {value!r} is not used" in caplog.text
        assert getattr(args, name) == value or is_default or is_said, name


def leaves(config: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(config, dict):
        return [(path, config)]
    return [leaf for key, value in config.items() for leaf in leaves(value, (*path, key))]


@pytest.mark.parametrize(
    ("hparams", "stated", "key"),
    [
        ({"global_batch_size": 8}, {"per_device_train_batch_size": 3}, "hyperparameters.global_batch_size"),
        ({"pipe_parallel_size": 2}, {}, "hyperparameters.pipe_parallel_size"),
        ({"fit": {"checkpoint_period": {"minutes": 15}}}, {}, "hyperparameters.fit.checkpoint_period"),
        ({"training_arguments": {"sed": 1}}, {}, "hyperparameters.training_arguments.sed"),
        ({"slots": 2}, {}, "resources.slots_per_trial"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    trial: Trial, tmp_path: Path, hparams: dict[str, Any], stated: dict[str, Any], key: str
) -> None:
    trial({"deepspeed_config": {}, **hparams}, metric="eval_loss", slots=hparams.pop("slots", 1))
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(output_dir=str(tmp_path), **stated)
    assert key in [problem.key for problem in caught.value.problems]
    assert all(problem.fix for problem in caught.value.problems)
