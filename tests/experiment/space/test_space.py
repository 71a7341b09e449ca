"""A search space -> the one point that is tried without a search; what the master would refuse is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.reading import parse_yaml
from determined_ds.experiment.experiment import Experiment, parse_experiment, with_override
from determined_ds.experiment.space.space import SPEC_FIELDS, middle_of
from tests.experiments.master_schemas import SCHEMA_DIR, sanity_errors
from tests.making import ENTRYPOINT, refusal

SINGLE = {"name": "single", "metric": "validation_loss"}


def experiment(text: str = "", **sections: Any) -> Experiment:
    """An experiment from YAML text, or from sections; an entrypoint is added."""
    read = parse_yaml(text, "a.yaml") if text else Document(name="a.yaml", data=dict(sections))
    data = {"entrypoint": ENTRYPOINT, **read.data}
    return parse_experiment(Document(name=read.name, data=data, places=read.places))


SPECS: dict[str, tuple[dict[str, Any], Any]] = {
    "const": ({"type": "const", "val": 3}, 3),
    "const-null": ({"type": "const", "val": None}, None),
    "const-spec": ({"type": "const", "val": {"type": "AdamW"}}, {"type": "AdamW"}),
    "categorical": ({"type": "categorical", "vals": ["b", "a"]}, "b"),
    "int": ({"type": "int", "minval": 1, "maxval": 8}, 4),
    "int-count": ({"type": "int", "minval": 1, "maxval": 8, "count": 2}, 4),
    "double": ({"type": "double", "minval": 0, "maxval": 1}, 0.5),
    "log": ({"type": "log", "minval": -4, "maxval": -2, "base": 10}, 1e-3),
}
NO_SPECS: dict[str, dict[str, Any]] = {
    "no-val": {"type": "const"},
    "two-forms": {"type": "const", "val": 1, "vals": [1]},
    "no-vals": {"type": "categorical"},
    "word-for-vals": {"type": "categorical", "vals": "abc"},
    "no-maxval": {"type": "int", "minval": 1},
    "half": {"type": "int", "minval": 1, "maxval": 2.5},
    "equal": {"type": "double", "minval": 1, "maxval": 1},
    "reversed": {"type": "int", "minval": 2, "maxval": 1},
    "words": {"type": "double", "minval": "a", "maxval": "b"},
    "truth": {"type": "int", "minval": False, "maxval": True},
    "no-base": {"type": "log", "minval": 1, "maxval": 2},
    "base-zero": {"type": "log", "minval": 1, "maxval": 2, "base": 0},
    "unknown": {"type": "AdamW", "params": {}},
    "unknown-field": {"type": "double", "minval": 0, "maxval": 1, "step": 0.1},
}


@pytest.mark.parametrize("kind", SPEC_FIELDS)
def test_the_fields_of_a_hyperparameter_are_those_of_the_masters_schema(kind: str) -> None:
    schema = json.loads((SCHEMA_DIR / f"hyperparameter-{kind}.json").read_text())
    assert {"type", *SPEC_FIELDS[kind]} == set(schema["properties"])
    assert set(schema["required"]) - {"type"} == set(SPEC_FIELDS[kind]) - {"count"}


@pytest.mark.parametrize(("spec", "point"), SPECS.values(), ids=SPECS.keys())
def test_one_point_is_chosen(spec: dict[str, Any], point: Any) -> None:
    """At the top, and nested; what the master would take is taken."""
    hyperparameters = {"h": spec, "nested": {"deeper": copy.deepcopy(spec), "own": 1}}
    read = experiment(hyperparameters=hyperparameters)
    assert read.hyperparameters.data == {
        "h": pytest.approx(point),
        "nested": {"deeper": pytest.approx(point), "own": 1},
    }
    assert read.config["hyperparameters"] == hyperparameters
    searched = () if spec["type"] == "const" else ("hyperparameters.h", "hyperparameters.nested.deeper")
    assert read.searched == searched
    assert sanity_errors({"searcher": SINGLE, "hyperparameters": hyperparameters}) == []


@pytest.mark.parametrize("spec", NO_SPECS.values(), ids=NO_SPECS.keys())
def test_what_the_master_refuses_to_search_is_refused(spec: dict[str, Any]) -> None:
    assert sanity_errors({"searcher": SINGLE, "hyperparameters": {"h": spec}})
    problem = refusal(lambda: experiment(hyperparameters={"a": {"h": spec}}))
    assert (problem.key, problem.code) == ("hyperparameters.a.h", "hyperparameter-spec")


def test_an_embedded_deepspeed_config_has_to_be_wrapped() -> None:
    """As for the master: its `optimizer` has a key `type`."""
    ds = {"optimizer": {"type": "AdamW"}}
    assert sanity_errors({"searcher": SINGLE, "hyperparameters": {"deepspeed_config": ds}})
    problem = refusal(lambda: experiment(hyperparameters={"deepspeed_config": ds}))
    assert problem.key == "hyperparameters.deepspeed_config.optimizer"
    assert "{type: const, val: {...}}" in problem.fix
    wrapped = {"deepspeed_config": {"type": "const", "val": ds}}
    assert sanity_errors({"searcher": SINGLE, "hyperparameters": wrapped}) == []
    assert experiment(hyperparameters=wrapped).hyperparameters.data == {"deepspeed_config": ds}


def test_a_list_hides_a_type() -> None:
    listed = {"layers": [{"type": "linear"}]}
    assert sanity_errors({"searcher": SINGLE, "hyperparameters": listed}) == []
    assert experiment(hyperparameters=listed).hyperparameters.data == listed


def test_what_is_wrapped_keeps_its_places() -> None:
    text = """
hyperparameters:
  deepspeed_config:
    type: const
    val:
      zero_optimization:
        stage: 1
  lr: {type: double, minval: 0, maxval: 1}
"""
    read = experiment(text)
    assert read.hyperparameters.origin(("deepspeed_config", "zero_optimization", "stage")) == "a.yaml:7"
    assert read.hyperparameters.origin(("lr",)) == "a.yaml:8"
    setting = "hyperparameters.deepspeed_config.val.zero_optimization.stage=2"
    document = with_override(parse_yaml(text + f"entrypoint: {ENTRYPOINT}", "a.yaml"), setting)
    stage: KeyPath = ("deepspeed_config", "zero_optimization", "stage")
    again = parse_experiment(document).hyperparameters
    assert (again.get(stage), again.origin(stage)) == (2, f"--set {setting}")


@given(low=st.integers(-100, 100), width=st.integers(1, 100), base=st.sampled_from([2, 10, 1.5]))
def test_the_middle_lies_within(low: int, width: int, base: float) -> None:
    high = low + width
    for kind in ("int", "double"):
        assert low <= middle_of({"type": kind, "minval": low, "maxval": high}) <= high
    assert base**low < middle_of({"type": "log", "minval": low, "maxval": high, "base": base}) < base**high
