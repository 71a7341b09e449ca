"""The web UI's search form loses constants that are 0, false or null: without them, a template is the same training.

Source: seen in the web UI of Determined 0.38.1, in what it posts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.documents.document import Document, KeyPath, dotted, plain_copy
from determined_ds.experiment.experiment import Experiment, load_experiment, parse_experiment
from determined_ds.experiment.space.space import SPEC_TYPES
from tests.making import CUDA, EXPERIMENTS, ROOT, resolved_of

LOST = (0, False, None)


def lost(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The constants that the form loses, at any depth."""
    for key, item in value.items():
        if isinstance(item, dict):
            if item.get("type") not in SPEC_TYPES:
                yield from lost(item, (*path, key))
        elif any(item is each or (item == each and type(item) in (int, float)) for each in LOST):
            yield (*path, key)


def without(experiment: Experiment, paths: list[KeyPath]) -> Experiment:
    data = plain_copy(experiment.config)
    for path in paths:
        section = data["hyperparameters"]
        for step in path[:-1]:
            section = section[step]
        del section[path[-1]]
    return parse_experiment(Document(name=experiment.document.name, data=data))


def resolved(experiment: Experiment) -> ResolvedConfig:
    return resolved_of(experiment, CUDA)


CONSTANTS = [
    pytest.param(path, lost_one, id=f"{path.parent.name}-{path.stem}-{dotted(lost_one)}")
    for path in EXPERIMENTS
    for lost_one in lost(load_experiment(path).config["hyperparameters"])
]


def test_the_templates_hold_such_constants() -> None:
    """Else the rest would mean nothing."""
    names = {dotted(each.values[1]) for each in CONSTANTS}  # type: ignore[arg-type]
    assert names >= {
        "weight_decay",
        "dropout",
        "lora",
        "lora.dropout",
        "pretrained",
        "activation_checkpointing",
    }


@pytest.mark.parametrize(("path", "constant"), CONSTANTS)
def test_without_it_deepspeed_is_given_the_same(path: Path, constant: KeyPath) -> None:
    whole = load_experiment(path)
    with_it, without_it = resolved(whole), resolved(without(whole, [constant]))
    assert without_it.ds_config == with_it.ds_config
    # All but what says where a value came from: a line of a file, or not.
    origins = {name: getattr(with_it, name) for name in ("ds", "stated", "hyperparameters")} | {
        "warnings": ()
    }
    assert without_it.stated.data == with_it.stated.data
    assert dataclasses.replace(without_it, **origins) == dataclasses.replace(with_it, warnings=())
    assert [each.message for each in without_it.warnings] == [each.message for each in with_it.warnings]


def told_of(trial: Any) -> dict[str, Any]:
    """What a trial has read of its hyperparameters, in a form that can be compared."""
    found = {}
    for name, value in vars(trial).items():
        if hasattr(value, "to_dict"):
            found[name] = value.to_dict()
        elif isinstance(value, (bool, int, float, str, list, tuple, type(None))) or (
            dataclasses.is_dataclass(value) and name in ("options", "lora")
        ):
            found[name] = value
        elif hasattr(value, "model_dump"):
            found[name] = value.model_dump()
    return found


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_without_any_of_them_its_model_is_the_same(path: Path) -> None:
    """Of the model alone: on the meta device, where nothing is allocated."""
    import torch

    from determined_ds.runtime.shapes.bare_trial import bare_trial, inside, trial_class
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    whole = load_experiment(path)
    lean = without(whole, list(lost(whole.config["hyperparameters"])))
    if whole.script is not None:
        first, second = (shape_of_experiment(each, resolved(each), ROOT) for each in (whole, lean))
        assert first == second
        return
    read = []
    with inside(ROOT):
        for experiment in (whole, lean):
            kind = trial_class(experiment)
            trial = bare_trial(kind, experiment, resolved(experiment), "meta")
            trial.prepare()
            with torch.device("meta"):
                sizes = sizes_of(trial)
            read.append({**told_of(trial), "sizes": sizes})
    assert read[0].keys() >= {"config", "sizes"}
    assert read[0] == read[1]


def sizes_of(trial: Any) -> Any:
    """Name and shape of every parameter; of a pipeline, its layers' arguments."""
    if hasattr(trial, "build_layers"):
        return [(spec.typename.__name__, len(spec.module_args)) for spec in trial.build_layers()]
    models = trial.build_models() if hasattr(trial, "build_models") else {"": trial.build_model()}
    return {
        f"{name}/{key}": tuple(parameter.shape)
        for name, model in models.items()
        for key, parameter in model.named_parameters()
    }
