"""The shape of a script's model, where a hyperparameter describes one of Hugging Face's. The script is not run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from determined_ds.config.params import OWN_KEYS
from determined_ds.documents.document import KeyPath
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.memory.model import ModelShape
from determined_ds.train.shapes.of_huggingface import read_config, shape_of_config

MODEL_TYPE = "model_type"  # in every configuration of transformers
# Hyperparameters by which scripts state the tokens of a sample.
LENGTHS = ("sequence_length", "max_seq_length", "max_length", "block_size")
SAY_SIZE = (
    "state it as a hyperparameter (a config.json, its folder, or a mapping with model_type) that the script builds the "
    "model from; or give its size: det-ds check --memory --parameters 345M --layers 24 --hidden 1024"
)


def shape_of_script(experiment: Experiment, precision: str) -> ModelShape:
    """The shape of the model that a hyperparameter describes; the current folder is the context directory.

    Its activations are measured where a hyperparameter states the tokens of a sample; else they are unknown.

    Args:
        experiment: Of the script.
        precision: What it is trained in: ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        ConfigError: no hyperparameter describes a model, or two describe different ones, or it cannot be built.
    """
    hyperparameters = experiment.hyperparameters
    found = dict(_descriptions(hyperparameters.data, ()))
    names = {path: hyperparameters.key(path) for path in found}
    if len({_identity(source) for source in found.values()}) != 1:
        several = f"{' and '.join(names.values())} describe different models"
        message = (
            several if found else "a script builds its model by itself, and no hyperparameter describes it"
        )
        fix = "state one of them" if found else SAY_SIZE
        raise ConfigError(
            experiment.document.problem(("entrypoint",), message, fix, "unknown-model", value=NOT_GIVEN)
        )
    [(path, source), *_] = found.items()

    def refuse(message: str, fix: str) -> ConfigError:
        value = str(source) if isinstance(source, Path) else NOT_GIVEN
        origin = hyperparameters.origin(path)
        return ConfigError(
            Problem(key=names[path], value=value, origin=origin, message=message, fix=fix, code="hf-config")
        )

    stated = (hyperparameters.get((name,)) for name in LENGTHS)
    length = next((value for value in stated if type(value) is int and value > 0), 0)
    assumptions = (f"the script trains the model of {names[path]}, and all of it",)
    config = read_config(source, refuse)
    return shape_of_config(
        config, sequence_length=length, precision=precision, assumptions=assumptions, refuse=refuse
    )


def _descriptions(data: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Path | dict[str, Any]]]:
    """Hyperparameters that describe a model: mappings with a ``model_type``, and paths of a ``config.json``."""
    for key, value in data.items():
        here = (*path, key)
        if here[0] in OWN_KEYS:
            continue
        if isinstance(value, Mapping) and isinstance(value.get(MODEL_TYPE), str):
            yield here, dict(value)
        elif isinstance(value, Mapping):
            yield from _descriptions(value, here)
        elif isinstance(value, str) and value:
            file = Path(value) if value.endswith(".json") else Path(value, "config.json")
            if _describes(file):
                yield here, file


def _describes(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and isinstance(found.get(MODEL_TYPE), str)


def _identity(source: Path | dict[str, Any]) -> str:
    """Equal for two names of one model, such as a folder that is named for its tokenizer as well."""
    if isinstance(source, Path):
        return str(source.resolve())
    return json.dumps(source, sort_keys=True, default=str)
