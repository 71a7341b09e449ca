"""An experiment YAML means here what it means to Determined, and what Determined would refuse is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment import experiment as under_test
from determined_ds.experiment.experiment import (
    LARGEST_SEED,
    SEARCHERS,
    load_experiment,
    parse_experiment,
    with_override,
)
from tests.experiments.master_code import create_errors
from tests.experiments.master_schemas import SCHEMA_DIR, sanity_errors
from tests.making import ENTRYPOINT, EXPERIMENTS, refusal, refusals

SINGLE = {"name": "single", "metric": "validation_loss"}


def experiment(text: str = "", **sections: Any) -> under_test.Experiment:
    """An experiment from YAML text, or from sections; an entrypoint is added."""
    read = parse_yaml(text, "a.yaml") if text else Document(name="a.yaml", data=dict(sections))
    data = {"entrypoint": ENTRYPOINT, **read.data}
    return parse_experiment(Document(name=read.name, data=data, places=read.places))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_of_the_repository_is_one(path: Path) -> None:
    read = load_experiment(path)
    assert "model_defs." in str(read.entrypoint)
    assert read.slots == read.config["resources"]["slots_per_trial"]
    assert read.name == read.config["name"]
    assert read.metric.startswith(("validation_", "eval_"))
    assert bool(read.searched) == (path.stem == "search")


def test_what_is_absent_has_determineds_default() -> None:
    read = experiment(entrypoint=ENTRYPOINT)
    assert (read.name, read.slots, read.seed, read.metric) == ("unnamed", 1, 0, "")
    assert read.smaller_is_better
    assert read.hyperparameters.data == {}
    assert experiment("resources:\nhyperparameters:\nsearcher:\nname:\n").slots == 1


# ------------------------------------------------------------------------------------------------ unknown keys


@pytest.mark.parametrize(
    ("schema", "known"),
    [
        ("experiment", under_test.EXPERIMENT_KEYS),
        ("resources", under_test.RESOURCES_KEYS),
        ("reproducibility", under_test.REPRODUCIBILITY_KEYS),
        ("environment", under_test.ENVIRONMENT_KEYS),
        ("profiling", under_test.PROFILING_KEYS),
    ],
)
def test_the_known_keys_are_those_of_the_masters_schema(schema: str, known: frozenset[str]) -> None:
    assert known == set(json.loads((SCHEMA_DIR / f"{schema}.json").read_text())["properties"])


def test_the_known_keys_of_a_searcher_are_those_of_any_searcher() -> None:
    files = [SCHEMA_DIR / f"searcher-{name.replace('_', '-')}.json" for name in SEARCHERS]
    assert {
        key for file in files for key in json.loads(file.read_text())["properties"]
    } == under_test.SEARCHER_KEYS


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("hyperparameter: {a: 1}", "hyperparameter", "'hyperparameters'"),
        ("resources:\n  slot_per_trial: 2", "resources.slot_per_trial", "'slots_per_trial'"),
        ("resources:\n  slots: 2", "resources.slots", "resources.slots_per_trial"),
        ("searcher:\n  metrics: loss", "searcher.metrics", "'metric'"),
        ("reproducibility:\n  seed: 1", "reproducibility.seed", "experiment_seed"),
        ("environment:\n  env_variables: [A=1]", "environment.env_variables", "'environment_variables'"),
        ("profiling:\n  enable: true", "profiling.enable", "'enabled'"),
        ("global_batch_size: 2", "global_batch_size", "hyperparameters.global_batch_size"),
        ("slots_per_trial: 2", "slots_per_trial", "resources.slots_per_trial"),
        ("metric: loss", "metric", "searcher.metric"),
    ],
)
def test_an_unknown_key_is_told_with_what_was_meant(text: str, key: str, meant: str) -> None:
    problem = refusal(lambda: experiment(text))
    assert (problem.key, problem.code) == (key, "unknown-key")
    assert problem.origin == f"a.yaml:{text.count(chr(10)) + 1}"
    assert meant in problem.fix
    assert sanity_errors(parse_yaml(text, "a").data) or key == "resources.slots"


def test_all_that_is_wrong_is_told_at_once() -> None:
    text = """
nam: x
resources: {slots_per_trial: 0}
reproducibility: {experiment_seed: -1}
searcher: {name: asha, smaller_is_better: 1}
hyperparameters: {lr: {type: log}}
entrypoint: torchrun train.py
"""
    problems = refusals(lambda: parse_experiment(parse_yaml(text, "a.yaml")))
    assert {(problem.key, problem.origin) for problem in problems} == {
        ("nam", "a.yaml:2"),
        ("resources.slots_per_trial", "a.yaml:3"),
        ("reproducibility.experiment_seed", "a.yaml:4"),
        ("searcher.name", "a.yaml:5"),
        ("searcher.smaller_is_better", "a.yaml:5"),
        ("hyperparameters.lr", "a.yaml:6"),
        ("entrypoint", "a.yaml:7"),
    }
    assert len(problems) == 7


@pytest.mark.parametrize(
    ("section", "value", "said", "fix"),
    [
        ("name", 5, "must be a string, not an integer", "write a string"),
        ("resources", 2, "must be a mapping, not an integer", "write a mapping"),
        ("resources", [], "must be a mapping, not a list", "write a mapping"),
        ("hyperparameters", "lr", "must be a mapping, not a string", "write a mapping"),
        ("searcher", "single", "must be a mapping, not a string", "write a mapping"),
        ("resources.slots_per_trial", "2", "must be an integer, not a string", "remove the quotes: 2"),
        ("resources.slots_per_trial", 2.0, "must be an integer, not a number", "write 2"),
        ("resources.slots_per_trial", True, "must be an integer, not true or false", "write an integer"),
        ("resources.slots_per_trial", 0, "must be 1 or more", "number of devices"),
        ("reproducibility.experiment_seed", -1, "must be 0 or more", "seed >= 0"),
        ("reproducibility.experiment_seed", LARGEST_SEED + 1, "must be at most", "smaller"),
        ("max_restarts", -1, "must be 0 or more", ""),
        ("max_restarts", "often", "must be an integer, not a string", "write an integer"),
        ("debug", 7, "must be true or false, not an integer", "write true or false"),
        ("profiling.enabled", 2, "must be true or false, not an integer", "write true or false"),
        ("searcher.smaller_is_better", "yes", "must be true or false, not a string", "write true or false"),
        ("searcher.name", "singel", "no such searcher", "did you mean single?"),
        ("searcher.name", None, "must be a string, not null", "use one of single"),
    ],
)
def test_a_wrong_value_is_told_once(section: str, value: Any, said: str, fix: str) -> None:
    name, _, key = section.partition(".")
    problem = refusal(lambda: experiment(**{name: {key: value} if key else value}))
    assert (problem.key, problem.value) == (section, value)
    assert said in problem.message
    assert fix in problem.fix


# ------------------------------------------------------------------------------------------------------- --set

BASE = """
name: base
resources: {slots_per_trial: 2}
data: {path: x, tokenizer: null}
hyperparameters:
  global_batch_size: 32
  fit: {max_length: {batches: 200}}
  nothing:
"""
OVERRIDES = [
    "name=other",
    "name=",
    "name=a=b",
    "resources.slots_per_trial=4",
    "resources={priority: 3}",
    "resources.devices=[/a:/b]",
    "labels=a,b,3",
    "labels=[a, b]",
    "labels=a,",
    "data.path=null",
    "data.new.deeper=1",
    "hyperparameters.fit={}",
    "hyperparameters.fit={reporting_period: {batches: 5}}",
    "hyperparameters.fit.max_length={epochs: 3}",
    "hyperparameters.fit.max_length.batches=10",
    "hyperparameters.fit=null",
    "hyperparameters.nothing.at_all=1",
    "hyperparameters.lr=1e-3",
    "hyperparameters.lr=0.5",
    "hyperparameters.lr={type: log, minval: -3, maxval: -2, base: 10}",
    "hyperparameters.flag=true",
    "hyperparameters.flag='true'",
    "hyperparameters.list=[1, [2, 3], {a: b}]",
    "hyperparameters.list=0.9,0.999",
    "hyperparameters.mixed=1,a,null,1e-8",
    "hyperparameters.padded=010",
    "hyperparameters.padded=08",
    "hyperparameters.time=1:30",
    "hyperparameters.date=2024-01-01",
    "hyperparameters.answer=yes",
    "hyperparameters.words=a b",
    "bind_mounts={host_path: /a, container_path: /b}",
    "bind_mounts=[{host_path: /a, container_path: /b}]",
]


def as_the_master_gets_it(text: str, overrides: list[str]) -> Any:
    """What `det experiment create --config` sends, as the master reads it.

    Between the two `yes` and a date change what they are: to `det` they are a word and a date, to the master
    a boolean and a word. `1e-3` is a number to both, as it is here; only plain PyYAML takes it for a word.
    """
    from determined.cli.ntsc import parse_config_overrides
    from determined.common.util import yaml_safe_dump, yaml_safe_load

    sent = yaml_safe_dump(parse_config_overrides(yaml_safe_load(text), overrides))
    assert sent is not None
    return parse_yaml(sent, "sent").data


def as_we_get_it(text: str, overrides: list[str]) -> Any:
    document = parse_yaml(text, "a.yaml")
    for override in overrides:
        document = with_override(document, override)
    return document.data


@pytest.mark.parametrize("override", OVERRIDES)
def test_set_means_what_config_means_to_det(override: str) -> None:
    assert as_we_get_it(BASE, [override]) == as_the_master_gets_it(BASE, [override])


WORDS = ["a", "a b", "1", "1.5", "1x", "null", "true", "", "a/b.json"]
VALUES = st.recursive(
    st.integers(-(2**63), 2**63) | st.booleans() | st.none() | st.floats(-1e6, 1e6) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("pqr"), inner, min_size=1, max_size=2)
    ),
    max_leaves=5,
)
SETTINGS = st.tuples(st.sampled_from(["new", "new.a", "new.a.b", "other"]), VALUES)


@given(st.lists(SETTINGS, min_size=1, max_size=3))
def test_settings_are_laid_one_over_the_other(pairs: list[tuple[str, Any]]) -> None:
    overrides = [f"{key}={json.dumps(value)}" for key, value in pairs]
    try:
        expected = as_the_master_gets_it("name: x", overrides)
    except (TypeError, AttributeError):  # det fails where a mapping is laid over a value that is none
        return
    assert as_we_get_it("name: x", overrides) == expected


def test_a_null_elsewhere_stays_null() -> None:
    """By design not as `det` has it: there, every null of a name that the key holds becomes `{}`."""
    assert as_the_master_gets_it("a: {path: null}", ["data.path=x"])["a"] == {"path": {}}
    assert as_we_get_it("a: {path: null}", ["data.path=x"])["a"] == {"path": None}


def test_the_last_setting_wins_and_is_the_origin() -> None:
    document = parse_yaml(BASE, "a.yaml")
    for override in ("resources.slots_per_trial=4", "resources.slots_per_trial=8"):
        document = with_override(document, override)
    assert document.get(("resources", "slots_per_trial")) == 8
    assert document.origin(("resources", "slots_per_trial")) == "--set resources.slots_per_trial=8"
    assert document.origin(("name",)) == "a.yaml:2"


@pytest.mark.parametrize("override", ["", "name", "=1", ".=1", "a..b=1", "a.=1", ".a=1"])
def test_what_is_no_setting_is_refused(override: str) -> None:
    assert "KEY=VALUE" in refusal(lambda: with_override(parse_yaml(BASE, "a"), override)).message


@pytest.mark.parametrize(
    "value", ["[1", "{a: 1, a: 2}", "a: b: c", ".nan", "*a", "&a [*a]", "\udcff", "1,[2", "'a, b'"]
)
def test_a_setting_that_does_not_parse_is_refused_by_its_key(value: str) -> None:
    problem = refusal(lambda: with_override(parse_yaml(BASE, "a"), f"name={value}"))
    assert "--set name" in str(problem)


# --------------------------------------------------------------------------------------------------- the master

ODD = st.sampled_from([None, 0, 1, -1, 2**33, 1.5, "x", "2", True, [], {}, ["a"], {"a": 1}])
FIELDS = st.sampled_from(
    """name entrypoint hyperparameters resources resources.slots_per_trial resources.slots resources.slot
    reproducibility reproducibility.experiment_seed searcher.name searcher.metric searcher.smaller_is_better
    searcher.metrics labels descriptio""".split()  # noqa: SIM905
)


@given(st.lists(st.tuples(FIELDS, ODD), max_size=3))
def test_what_is_accepted_the_master_accepts(edits: list[tuple[str, Any]]) -> None:
    """In the fields that decide a run here. `create_errors` also tells what the master's code refuses."""
    config: dict[str, Any] = {"entrypoint": ENTRYPOINT, "searcher": dict(SINGLE)}
    for field, value in edits:
        section, _, key = field.partition(".")
        if key:
            if not isinstance(config.setdefault(section, {}), dict):
                continue
            config[section] = {**config[section], key: copy.deepcopy(value)}
        elif field != "labels":
            config[section] = copy.deepcopy(value)
    try:
        parse_experiment(Document(name="a", data=config))
    except ConfigError:
        return
    assert sanity_errors(config) == []
    assert create_errors(config) == []
