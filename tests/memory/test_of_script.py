"""The sizes of a script's model, where a hyperparameter describes one of Hugging Face's; never a guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.resolve import Where
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import decide
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.memory import ModelShape
from determined_ds.memory.activations import are_known
from determined_ds.runtime.shapes.of_experiment import shape_of_experiment
from determined_ds.runtime.shapes.of_huggingface import shape_of_huggingface

CPU = Accelerator(name="cpu", num_devices=8, bf16=False, fp16=False)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shape_in(folder: Path, **hyperparameters: Any) -> ModelShape:
    """Of a script that has these hyperparameters; nothing reads the script."""
    data = {
        "name": "own",
        "entrypoint": "python3 train.py",
        "resources": {"slots_per_trial": 1},
        "hyperparameters": {
            "global_batch_size": 2,
            "deepspeed_config": {"type": "const", "val": {"optimizer": {"type": "Adam"}}},
            "learning_rate": 0.1,
            **hyperparameters,
        },
        "searcher": {"name": "single", "metric": "loss"},
    }
    experiment = parse_experiment(parse_yaml(json.dumps(data), "own.yaml"))
    resolved = decide(experiment, experiment.hyperparameters, Where(context_dir=folder, accelerator=CPU))
    return shape_of_experiment(experiment, resolved, folder)


def saved(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_a_mapping_a_file_and_a_folder_describe_the_same_model(tmp_path: Path) -> None:
    saved(tmp_path / "llama")
    whole = shape_of_huggingface(tmp_path / "llama", sequence_length=16, precision="fp32")
    for described in (
        {"model_config": LLAMA},
        {"model": "llama"},
        {"model": "llama/config.json"},
        {"model": {"name": "llama", "dropout": 0.1}},
        {"model": "llama", "tokenizer": "llama"},  # one folder, by two names
    ):
        assert shape_in(tmp_path, **described, sequence_length=16) == whole
    shape = shape_in(tmp_path, model="llama", sequence_length=16)
    assert shape.assumptions == ("the script trains the model of hyperparameters.model, and all of it",)


def test_activations_are_unknown_where_no_hyperparameter_states_the_length(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, model_config=LLAMA)
    assert shape.num_parameters > 0
    assert not are_known(shape)


@pytest.mark.parametrize(
    ("hyperparameters", "said", "fix"),
    [
        ({}, "no hyperparameter describes it", "state it as a hyperparameter"),
        ({"model": "gpt2", "data": "config.json"}, "no hyperparameter describes it", "--params"),
        ({"model": "llama", "teacher": "deep"}, "model and hyperparameters.teacher describe", "one of them"),
        ({"model": {"model_type": "nothing"}}, "nothing", "config.json of a model_type"),
        ({"model": {**LLAMA, "num_attention_heads": 5}}, "model.*is not a multiple", ""),
    ],
    ids=["none", "of the hub", "two", "unknown", "impossible"],
)
def test_anything_else_is_not_known(
    hyperparameters: dict[str, Any], said: str, fix: str, tmp_path: Path
) -> None:
    saved(tmp_path / "llama")
    saved(tmp_path / "deep", num_hidden_layers=8)
    with pytest.raises(ConfigError, match=said) as caught:
        shape_in(tmp_path, **hyperparameters)
    assert fix in caught.value.problems[0].fix
