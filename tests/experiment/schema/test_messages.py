"""What is said of a mistake: the key, its place, what is wrong, and what to write instead."""

from __future__ import annotations

import pytest

from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import EXPERIMENT_KEYS
from determined_ds.experiment.schema import experiment_problems

BASE = {
    "entrypoint": "entrypoint: python3 train.py",
    "searcher": "searcher: {name: single, metric: loss}",
}


def judged(text: str) -> tuple[list[Problem], list[Problem]]:
    """The errors and warnings of YAML text; an entrypoint and a searcher are put after it where it has none."""
    given = parse_yaml(text, "a.yaml").data if text else {}
    lines = [text, *(line for key, line in BASE.items() if key not in given)]
    return experiment_problems(parse_yaml("\n".join(lines), "a.yaml"))


def errors(text: str) -> list[Problem]:
    return judged(text)[0]


def error(text: str) -> Problem:
    """One mistake is one problem."""
    (problem,) = errors(text)
    return problem


def test_an_empty_config_lacks_two_things() -> None:
    problems, warnings = experiment_problems(Document(name="a.yaml", data={}))
    assert warnings == []
    assert {(problem.key, problem.code, problem.origin) for problem in problems} == {
        ("entrypoint", "missing-key", "a.yaml"),
        ("searcher", "missing-key", "a.yaml"),
    }


def test_a_problem_reads_as_a_compilers() -> None:
    text = "name: x\nresources:\n  slots_per_trial: two\n"
    problem = error(text)
    assert str(problem) == (
        "resources.slots_per_trial = 'two' (a.yaml:3): must be an integer, not a string\n"
        "  fix: write an integer"
    )
    assert (problem.origin.file, problem.origin.line, problem.origin.column) == ("a.yaml", 3, 3)  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------- types and bounds


@pytest.mark.parametrize(
    ("text", "key", "message", "fix"),
    [
        ("name: 5", "name", "must be a string, not an integer", 'put it in quotes: "5"'),
        ("name: yes", "name", "must be a string, not true or false", 'put it in quotes: "true"'),
        ("debug: 'true'", "debug", "must be true or false, not a string", "remove the quotes: true"),
        ("max_restarts: '3'", "max_restarts", "must be an integer, not a string", "remove the quotes: 3"),
        ("max_restarts: 2.5", "max_restarts", "must be an integer, not a number", "write 2"),
        ("max_restarts: -1", "max_restarts", "must be 0 or more", "write 0 or more"),
        ("scheduling_unit: 0", "scheduling_unit", "must be 1 or more", "write 1 or more"),
        ("labels: a", "labels", "must be a list, not a string", "write labels: [a]"),
        ("labels: [a, 1]", "labels.1", "must be a string, not an integer", 'put it in quotes: "1"'),
        ("resources: 2", "resources", "must be a mapping, not an integer", "write resources: {...}"),
        ("bind_mounts: {}", "bind_mounts", "must be a list, not a mapping", "write bind_mounts: [...]"),
        ("resources: {priority: 100}", "resources.priority", "must be at most 99", "write 99 or less"),
        ("internal: {}", "internal", "has been removed from Determined", "remove it"),
        (
            "reproducibility: {experiment_seed: 4294967296}",
            "reproducibility.experiment_seed",
            "must be at most 4294967295",
            "write 4294967295 or less",
        ),
        (
            "checkpoint_policy: bets",
            "checkpoint_policy",
            "must be one of best, all, none",
            "did you mean best? use one of best, all, none",
        ),
        (
            "resources: {shm_size: 1.5 gb}",
            "resources.shm_size",
            "must be a number of bytes, not a string",
            "write 1610612736",
        ),
        (
            f"resources: {{shm_size: {'9' * 500}g}}",
            "resources.shm_size",
            "must be a number of bytes, not a string",
            "write e.g. 8589934592",
        ),
        (
            "resources: {slots_per_trial: -1}",
            "resources.slots_per_trial",
            "must be 0 or more",
            "write 1 or more",
        ),
        (
            "environment: {image: 3}",
            "environment.image",
            "must be a string or a mapping of cpu, cuda or rocm, not an integer",
            "write e.g. image: determinedai/pytorch-ngc:0.38.1",
        ),
        (
            "environment: {pod_spec: {spec: {containers: [{name: determined-container, image: a}]}}}",
            "environment.pod_spec.spec.containers.0.image",
            "is Determined's to set in its own container",
            "set environment.image, or, if another container is intended, give that another name",
        ),
        (
            "profiling: {begin_on_batch: 5, end_after_batch: 4}",
            "profiling.end_after_batch",
            "must not be before begin_on_batch, which is 5",
            "write 5 or more",
        ),
        (
            "checkpoint_storage: {type: shared_fs, host_path: /a, storage_path: /b}",
            "checkpoint_storage.storage_path",
            "lies outside host_path",
            "write a relative path without .., or one below host_path",
        ),
    ],
)
def test_a_value(text: str, key: str, message: str, fix: str) -> None:
    problem = error(text)
    assert (problem.key, problem.message, problem.fix) == (key, message, fix)
    assert problem.origin == "a.yaml:1"


@pytest.mark.parametrize(
    "text", ["max_restarts: 1.0", "name:", "resources:", "resources: {slots: null, weight: 1}"]
)
def test_whole_numbers_and_nulls_are_fine(text: str) -> None:
    assert errors(text) == []


# ---------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("nam: x", "nam", "did you mean 'name'?"),
        ("entrypint: python3 train.py", "entrypint", "did you mean 'entrypoint'?"),
        ("searchr: {name: single, metric: loss}", "searchr", "did you mean 'searcher'?"),
        ("searcher: {name: single, metrics: loss}", "searcher.metrics", "did you mean 'metric'?"),
        ("searcher: {nam: single, metric: loss}", "searcher.nam", "did you mean 'name'?"),
        ("metric: loss", "metric", "did you mean searcher.metric?"),
        ("global_batch_size: 2", "global_batch_size", "did you mean hyperparameters.global_batch_size?"),
        ("image: a", "image", "did you mean environment.image?"),
        ("resources: {max_restarts: 1}", "resources.max_restarts", "at the top level, beside resources"),
        ("resources: {experiment_seed: 1}", "resources.experiment_seed", "reproducibility.experiment_seed"),
        ("resources: {slots: 2}", "resources.slots", "did you mean resources.slots_per_trial?"),
        (
            "bind_mounts: [{host_path: /a, container_path: /b, readonly: true}]",
            "bind_mounts.0.readonly",
            "'read_only'",
        ),
        ("checkpoint_storage: {bucket_name: b}", "checkpoint_storage.bucket_name", "did you mean 'bucket'?"),
        ("security: {ssl: 1}", "security.ssl", "known here: kerberos"),
        (
            "searcher: {name: single, metric: a, max_trials: 3}",
            "searcher.max_trials",
            "use searcher random or",
        ),
        (
            "checkpoint_storage: {type: s3, host_path: /a}",
            "checkpoint_storage.host_path",
            "use storage shared_fs",
        ),
    ],
)
def test_an_unknown_key_is_reported_once_with_what_was_meant(text: str, key: str, fix: str) -> None:
    problem = error(text)
    assert (problem.key, problem.code, problem.origin) == (key, "unknown-key", "a.yaml:1")
    assert problem.message.startswith("unknown key")
    assert fix in problem.fix


def test_a_hopeless_file_is_reported_in_twenty_problems() -> None:
    text = "\n".join(f"unknown_{index}: 1" for index in range(5000))
    problems = errors(text)
    assert len(problems) == 20
    assert [problem.origin.line for problem in problems[:19]] == list(range(1, 20))  # type: ignore[attr-defined]
    assert problems[-1].message == "4981 more problems"


@pytest.mark.parametrize(
    "value", [None, 3, "text", True, [], [1], {}, {"type": 1}, {"name": []}, {"a": {"b": []}}]
)
def test_any_value_in_any_place_is_judged(value: object) -> None:
    for key in EXPERIMENT_KEYS:
        experiment_problems(Document(name="a", data={key: value}))
        experiment_problems(Document(name="a", data={key: [value]}))
        experiment_problems(Document(name="a", data={key: {"type": value, "name": value}}))


def test_what_no_reader_lets_pass_is_a_problem_too() -> None:
    deep: object = 1
    for _ in range(300):
        deep = {"a": deep}
    for config in ({"\ud800": 1}, {"name": "\ud800"}, {"hyperparameters": deep}):
        assert experiment_problems(Document(name="a", data=config))[0]


# ------------------------------------------------------------------------------------------------------- the unions


@pytest.mark.parametrize(
    ("text", "key", "code", "said"),
    [
        ("searcher: {name: singel, metric: a}", "searcher.name", "out-of-range", "mean single?"),
        ("searcher: {metric: a}", "searcher.name", "missing-key", "missing: it says how"),
        ("searcher: {name: single}", "searcher.metric", "missing-key", "missing: it names"),
        ("searcher: {name: single, metric: null}", "searcher.metric", "missing-key", "null: it names"),
        ("searcher:", "searcher", "missing-key", "null: "),
        ("searcher: {name: custom, metric: a}", "searcher.name", "removed-key", "use random"),
        ("searcher: {name: 3, metric: a}", "searcher.name", "wrong-type", "use one of single, random"),
        ("searcher: {name: random, metric: a}", "searcher.max_trials", "missing-key", "max_trials: 16"),
        (
            "searcher: {name: adaptive_asha, metric: a, max_trials: 2, time_metric: batches}",
            "searcher.max_time",
            "missing-key",
            "write max_time: 1000",
        ),
        (
            "searcher: {name: single, metric: a, max_length: {batches: 0}}",
            "searcher.max_length.batches",
            "out-of-range",
            "write 1 or more",
        ),
        ("min_validation_period: {}", "min_validation_period", "invalid", "in one unit"),
        ("checkpoint_storage: {type: hdfs}", "checkpoint_storage.type", "removed-key", "use shared_fs"),
        ("checkpoint_storage: {type: gcss}", "checkpoint_storage.type", "out-of-range", "mean gcs?"),
        (
            "checkpoint_storage: {type: azure, account_url: a, connection_string: b}",
            "checkpoint_storage.connection_string",
            "invalid",
            "is given beside account_url",
        ),
        (
            "checkpoint_storage: {type: gcs, prefix: a/..}",
            "checkpoint_storage.prefix",
            "out-of-range",
            "climbs",
        ),
        ("log_policies: [{pattern: a}]", "log_policies.0", "missing-key", "needs a name"),
        ("log_policies: [{name: a, action: stop}]", "log_policies.0.action", "out-of-range", "use one of"),
        ("log_policies: [{name: a}, {name: a}]", "log_policies.1.name", "duplicate-key", "policy 0"),
        ("workspace: lab", "workspace", "missing-key", "given without project"),
        ("project: gpt2", "project", "missing-key", "given without workspace"),
        ("entrypoint: 3", "entrypoint", "wrong-type", "determined.launch.torch_distributed"),
        ("entrypoint:", "entrypoint", "missing-key", "null: it says which trial"),
    ],
)
def test_a_section(text: str, key: str, code: str, said: str) -> None:
    problem = error(text)
    assert (problem.key, problem.code) == (key, code)
    assert said in f"{problem.message}; {problem.fix}"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{save_trial_best: 2}",
        "{type: s3}",
        "{bucket: b}",
        "{bucket: b, host_path: null}",
        "{type: azure, credential: c}",
        "{storage_path: /anywhere}",
    ],
)
def test_the_clusters_storage_completes_a_configs(text: str) -> None:
    assert errors(f"checkpoint_storage: {text}") == []


# -------------------------------------------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        (
            "deepspeed_config:\n    optimizer:\n      type: AdamW",
            "deepspeed_config.optimizer",
            "wrap the whole hyperparameter: {type: const, val: {...}}",
        ),
        ("a:\n    b: {type: itn, minval: 1}", "a.b", "did you mean int?"),
        ("a:\n    b: {type: int, minval: 3}", "a.b.maxval", "write maxval: 10"),
        ("a:\n    b: {type: int, minval: 3, maxval: 3}", "a.b.maxval", "above 3"),
        ("a:\n    b: {type: int, minval: 0, maxval: 2.5}", "a.b.maxval", "write 2, or use type: double"),
        ("a:\n    b: {type: categorical, val: [1]}", "a.b.val", "did you mean 'vals'?"),
        ("a:\n    b: {type: log, base: 0, minval: 1, maxval: 2}", "a.b.base", "more than 0"),
    ],
)
def test_a_hyperparameter(text: str, key: str, fix: str) -> None:
    problem = error(f"hyperparameters:\n  {text}")
    assert problem.key == f"hyperparameters.{key}"
    assert problem.origin.line in (3, 4)  # type: ignore[attr-defined]
    assert fix in problem.fix


def test_a_grid_wants_counts_in_lists_too() -> None:
    text = "searcher: {name: grid, metric: a}\nhyperparameters:\n"
    text += "  a: [{type: int}]\n  b: {type: int, minval: 1, maxval: 2}"
    problems = errors(text)
    assert [(problem.key, problem.code, problem.origin) for problem in problems] == [
        ("hyperparameters.a.0", "hyperparameter-spec", "a.yaml:3"),
        ("hyperparameters.b", "hyperparameter-spec", "a.yaml:4"),
    ]
    assert errors(text.replace("grid", "single")) == []


def test_keys_named_like_the_kinds_of_hyperparameters_keep_their_places() -> None:
    problem = error("hyperparameters:\n  int: {nested: {const: {value: {type: log, minval: 1, maxval: 2}}}}")
    assert problem.key == "hyperparameters.int.nested.const.value.base"
