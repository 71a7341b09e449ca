"""A name from another document is taken where it means the same, refused with the right one else; never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.config.aliases import HYPERPARAMETERS, OF_THE_JSON, REFUSED
from determined_ds.config.hyperparameters import OWN_KEYS
from determined_ds.config.other_names import by_real_names, with_real_names
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.documents.document import Document, dotted, get_path
from tests.making import CUDA, EXPERIMENTS, decide, ds_json, hyperparameters, refusal, refusals

MICRO = "train_micro_batch_size_per_gpu"
BATCH = "global_batch_size: 8\n"
TOPOLOGY = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size", "data_parallel_world_size")


def taken_as(resolved: ResolvedConfig) -> list[tuple[str, str]]:
    """Warned of: the name that stands there, and the one that it is taken as."""
    return [
        (warning.key.removeprefix("hyperparameters."), warning.message.removeprefix("is taken as "))
        for warning in resolved.warnings
        if warning.code == "other-name"
    ]


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_a_hyperparameter_by_another_name(name: str) -> None:
    real = HYPERPARAMETERS[name]
    resolved = decide(f"{name}: 2\n" + ("" if real == "global_batch_size" else BATCH), slots=2)
    found: Any = resolved.topology if real in TOPOLOGY else resolved.batch
    assert getattr(found, real) == 2
    assert taken_as(resolved) == [(name, real)]


@pytest.mark.parametrize("name", OF_THE_JSON)
@pytest.mark.parametrize("left_open", [{}, "auto"], ids=["absent", "auto"])
def test_a_hyperparameter_that_is_a_value_of_the_json(name: str, left_open: Any) -> None:
    path = OF_THE_JSON[name]
    value: Any = True if path[-1] == "enabled" else 2
    ds = {} if left_open == {} else {path[0]: {path[1]: "auto"} if len(path) > 1 else "auto"}
    resolved = decide(f"{BATCH}{name}: {str(value).lower()}", ds, slots=2, accelerator=CUDA)
    assert get_path(resolved.ds_config, path) == value
    assert resolved.origins[dotted(path)] == f"{name}, hp.yaml:2"
    assert taken_as(resolved) == ([] if (name,) == path else [(name, dotted(path))])


def test_both_names_with_the_same_value_agree() -> None:
    resolved = decide(
        f"{BATCH}pipe_parallel_size: 2\npipeline_parallel_size: 2\nzero_stage: 1",
        {"zero_optimization": {"stage": 1}},
    )
    assert resolved.topology.pipe_parallel_size == 2
    assert resolved.zero_stage == 1
    assert resolved.warnings[:-1] == ()  # but for the bubble


@pytest.mark.parametrize(
    ("hp", "ds", "said"),
    [
        ("pipe_parallel_size: 1\npipeline_parallel_size: 2", {}, "pipe_parallel_size, which is 1 (hp.yaml:2)"),
        ("pp_size: 1\npipeline_parallel_size: 2", {}, "pipe_parallel_size, which is 1 (pp_size, hp.yaml:2)"),
        ("tp_size: 1\nmp_size: 2", {}, "model_parallel_size, which is 1 (tp_size, hp.yaml:2)"),
        ("micro_batch_size: 1\nmicro_batch_size_per_gpu: 2", {}, "micro_batch_size, which is 1 (hp.yaml:2)"),
        (f"micro_batch_size: 1\n{MICRO}: 2", {}, f"{MICRO}, which is 1 (hp.yaml:2)"),
        (f"{MICRO}: 2", {MICRO: 4}, f"{MICRO}, which is 4 (ds.json)"),
        ("use_bf16: false", {"bf16": {"enabled": True}}, "bf16.enabled, which is true (ds.json)"),
        (
            f"overwrite_deepspeed_args: {{{MICRO}: 4}}\n{MICRO}: 2",
            {"train_micro_batch_size_per_gpu": "auto"},
            "train_micro_batch_size_per_gpu, which is 4 (hp.yaml:2)",
        ),
    ],
)  # fmt: skip
def test_two_names_with_two_values_are_refused_with_both(hp: str, ds: Any, said: str) -> None:
    problem = next(p for p in refusals(lambda: decide(BATCH + hp, ds)) if p.code == "other-name")
    assert problem.message == f"is another name of {said}"
    assert problem.value in (2, False)
    assert problem.fix.startswith("keep ")


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_means_something_else_is_refused_with_what_to_write(name: str) -> None:
    row = REFUSED[name]
    value: Any = {"stages": 2} if dict in row.kinds else 2
    hp = {name: value, **({} if "global_batch_size" in row.beside else {"global_batch_size": 8})}
    problem = next(p for p in refusals(lambda: decide(hp)) if p.code == "other-name")
    assert problem.key == f"hyperparameters.{name}"
    assert problem.message == "is not read by this library"
    assert row.write in problem.fix


@pytest.mark.parametrize(
    ("hp", "ds"),
    [
        ("global_batch_size: 8\nbatch_size: 4", {}),
        ("per_slot_batch_size: 4", {"train_batch_size": 8}),
        ("global_batch_size: 8\nmicro_batch_size: 2\nbatch_size: 4", {}),
        ("batch_size: 4\noverwrite_deepspeed_args: {train_micro_batch_size_per_gpu: 4}", {}),
        ("global_batch_size: 8\npipe_parallel_size: 1\nnum_stages: 4", {}),
        ("global_batch_size: 8\npp_size: 1\nnum_stages: 4", {}),
        ("global_batch_size: 8\npipeline: text-generation", {}),
        ("global_batch_size: 8\ndeepspeed: true", {}),
    ],
)
def test_a_models_own_name_is_left_to_it(hp: str, ds: Any) -> None:
    """Where the right name is stated beside it, or it is of another type than the library's would be."""
    resolved = decide(hp, ds)
    assert resolved.topology.pipe_parallel_size == 1
    assert resolved.batch.global_batch_size == 8


def test_a_value_by_another_name_has_to_be_right_too() -> None:
    problem = refusal(lambda: decide(f"{BATCH}pp_size: two"))
    assert (problem.key, problem.value) == ("hyperparameters.pipe_parallel_size", "two")
    assert problem.origin == "pp_size, hp.yaml:2"
    problem = refusal(lambda: decide(f"{BATCH}{MICRO}: '2'"))
    assert (problem.key, problem.origin) == (MICRO, f"{MICRO}, hp.yaml:2")


@pytest.mark.parametrize(
    ("hp", "fix"),
    [
        ("pp_size: 1", "write pipe_parallel_size"),
        ("per_device_train_batch_size: 2", "write micro_batch_size"),
        ("use_bf16: false", "write overwrite_deepspeed_args.bf16.enabled"),
    ],
)
def test_a_warning_says_what_to_write(hp: str, fix: str) -> None:
    (warning,) = decide(BATCH + hp).warnings
    assert warning.fix == fix


def test_auto_and_null_say_nothing() -> None:
    resolved = decide(f"{BATCH}pp_size: auto\nmicro_batch_size_per_gpu: null\nuse_bf16: auto")
    assert taken_as(resolved) == []


def test_an_experiment_with_real_names_only_is_the_same() -> None:
    """What strategies are laid over: a value by another name must not stand against theirs."""
    hp = {"global_batch_size": 8, "pp_size": 2, "micro_batch_size_per_gpu": 2, "zero_stage": 1, "width": 4}
    document = with_real_names(Document(name="x.yaml", data={"hyperparameters": hp}))
    assert document.data["hyperparameters"] == {
        "global_batch_size": 8,
        "width": 4,
        "pipe_parallel_size": 2,
        "overwrite_deepspeed_args": {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 1},
        },
    }
    assert decide(document.data["hyperparameters"]).ds_config == decide(hp).ds_config


def test_no_other_name_is_a_real_one() -> None:
    tables = [*HYPERPARAMETERS, *OF_THE_JSON, *REFUSED]
    assert len(tables) == len(set(tables))
    assert not set(tables) & set(OWN_KEYS)


def test_the_templates_models_have_names_of_their_own() -> None:
    from determined_ds.experiment.experiment import load_experiment

    for path in EXPERIMENTS:
        point = load_experiment(path).hyperparameters
        named = by_real_names(point, ds_json({}))
        assert named == (point, named.ds, (), ()), path


def test_hyperparameters_without_other_names_are_passed_on_as_they_are() -> None:
    """They are judged by the thousand."""
    point = hyperparameters(BATCH)
    assert by_real_names(point, ds_json({})).hyperparameters is point
