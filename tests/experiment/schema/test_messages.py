"""What is said of a mistake in an experiment's YAML: one problem, at its key and line, that says what to write."""

from __future__ import annotations

import pytest
import yaml

from determined_ds import Problem
from tests.package import schema_problems

BASE = {"entrypoint": "entrypoint: python3 train.py", "searcher": "searcher: {name: single, metric: loss}"}

PATH_IN_HOST = "checkpoint_storage: {type: shared_fs, host_path: /a, storage_path: /b}"
KEYS_OF_AZURE = "checkpoint_storage: {type: azure, account_url: a, connection_string: b}"
OWN_CONTAINER = "environment: {pod_spec: {spec: {containers: [{name: determined-container, image: a}]}}}"
OWN_IMAGE = "environment.pod_spec.spec.containers.0.image"
NO_BASE = "{type: log, base: 0, minval: 1, maxval: 2}"


def judged(text: str) -> tuple[list[Problem], list[Problem]]:
    """The errors and warnings of YAML text; an entrypoint and a searcher are put after it where it has none."""
    given = yaml.safe_load(text.replace("entrypont", "entrypoint")) or {}
    return schema_problems("\n".join([text, *(line for key, line in BASE.items() if key not in given)]))


def error(text: str) -> Problem:
    """One mistake is one problem."""
    (problem,) = judged(text)[0]
    return problem


def test_an_empty_config_lacks_two_things() -> None:
    problems, warnings = schema_problems({})
    assert warnings == []
    assert [(problem.key, problem.code) for problem in problems] == [
        ("entrypoint", "missing-key"),
        ("searcher", "missing-key"),
    ]


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        # Types and bounds
        ("name: 5", "name", 'put it in quotes: "5"'),
        ("resources: {shm_size: 1.5 gb}", "resources.shm_size", "write shm_size: 8589934592"),
        ("resources: {slots_per_trial: -1}", "resources.slots_per_trial", "write 0 or more"),
        ("environment: {image: 3}", "environment.image", "write image: determinedai/"),
        (OWN_CONTAINER, OWN_IMAGE, "set environment.image"),
        (
            PATH_IN_HOST,
            "checkpoint_storage.storage_path",
            "a relative path without .., or one below host_path",
        ),
        # Unknown keys, with what was meant
        ("searcher: {name: single, metrics: loss}", "searcher.metrics", "did you mean 'metric'?"),
        ("resources: {max_restarts: 1}", "resources.max_restarts", "at the top level, beside resources"),
        (
            "environment: {environment_variables: {tpu: []}}",
            "environment.environment_variables.tpu",
            "known here",
        ),
        ("checkpoint_storage: {bucket_name: b}", "checkpoint_storage.bucket_name", "did you mean 'bucket'?"),
        (
            "searcher: {name: single, metric: a, max_trials: 3}",
            "searcher.max_trials",
            "known here: ",
        ),
        ("checkpoint_storage: {type: s3, host_path: /a}", "checkpoint_storage.host_path", "known here: "),
        # One of several forms
        ("searcher: {name: custom, metric: a}", "searcher.name", "use one of single, random"),
        ("min_validation_period: {}", "min_validation_period", "batches"),
        (KEYS_OF_AZURE, "checkpoint_storage.connection_string", "account_url"),
        ("log_policies: [{name: a, action: stop}]", "log_policies.0.action", "use one of"),
        ("log_policies: [{name: a}, {name: a}]", "log_policies.1.name", "another name"),
        # Hyperparameters
        ("hyperparameters: {a: {type: itn, minval: 1}}", "hyperparameters.a", "did you mean int?"),
        (f"hyperparameters: {{int: {{const: {NO_BASE}}}}}", "hyperparameters.int.const.base", "more than 0"),
    ],
)
def test_a_mistake_is_one_problem_that_says_what_to_write(text: str, key: str, fix: str) -> None:
    problem = error(text)
    assert problem.key == key
    assert fix in problem.fix
    assert problem.origin == "const.yaml:1"


@pytest.mark.parametrize("said", ["model_def:Trial", "python3 -m determined.launch.deepspeed --trial a:B"])
def test_an_entrypoint_that_names_a_class_is_a_warning_with_its_replacement(said: str) -> None:
    problems, (warning,) = judged(f"entrypoint: {said}")
    assert problems == []
    assert (warning.key, warning.code, warning.origin) == ("entrypoint", "deprecated-key", "const.yaml:1")
    assert "determined_ds.train" in warning.fix


@pytest.mark.parametrize(
    "text",
    [
        "max_restarts: 1.0",
        "resources: {slots: null, weight: 1}",
        "scheduling_unit:\ndata_layer:\nsecurity:\nname:",
        # The cluster's storage completes a config's.
        "checkpoint_storage: {}",
        "checkpoint_storage: {save_trial_best: 2}",
        "checkpoint_storage: {bucket: b, host_path: null}",
        "checkpoint_storage: {type: azure, credential: c}",
        "checkpoint_storage: {storage_path: /anywhere}",
    ],
)
def test_whole_numbers_nulls_and_what_the_cluster_completes_are_fine(text: str) -> None:
    assert judged(text) == ([], [])


def test_a_grid_wants_counts_in_lists_too() -> None:
    text = "searcher: {name: grid, metric: a}\nhyperparameters:\n"
    text += "  a: [{type: int}]\n  b: {type: int, minval: 1, maxval: 2}"
    problems, _ = judged(text)
    assert [(problem.key, problem.code, problem.origin) for problem in problems] == [
        ("hyperparameters.a.0", "hyperparameter-spec", "const.yaml:3"),
        ("hyperparameters.b", "hyperparameter-spec", "const.yaml:4"),
    ]
    assert judged(text.replace("grid", "single"))[0] == []


def test_a_misspelt_key_is_not_missing_too() -> None:
    problems, _ = judged("entrypont: python3 train.py\nresorces: {slots_per_trial: 2}")
    assert [(problem.key, problem.origin) for problem in problems] == [
        ("entrypont", "const.yaml:1"),
        ("resorces", "const.yaml:2"),
    ]


@pytest.mark.parametrize("config", [{"\ud800": 1}, {"name": "\ud800"}])
def test_a_surrogate_is_a_problem_too(config: dict[str, object]) -> None:
    assert schema_problems(config)[0]
