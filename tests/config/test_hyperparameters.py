"""The hyperparameters that the library reads: typed, in range, by their names, and no misspelt one is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Problem, ResolvedConfig
from tests.config.deciding import told
from tests.package import decide, own_hyperparameters, refusal

LARGEST = 2**31 - 1
OWN = [name for name in own_hyperparameters() if "." not in name and name != "fit"]
LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")
PLAIN = {"train_batch_size": 8}


def read(source: str | dict[str, Any]) -> ResolvedConfig:
    """Hyperparameters beside a JSON that states the batch."""
    return decide(source, PLAIN)


def refused(source: str | dict[str, Any]) -> Problem:
    return refusal(lambda: read(source))


def test_null_and_auto_are_as_absent() -> None:
    plain = read({})
    for nothing in (None, "auto"):
        for name in (
            "global_batch_size",
            "pipe_parallel_size",
            "zero_stage",
            "micro_batch_size",
            "trial_seed",
        ):
            found = read({name: nothing})
            assert (found.ds_config, found.origins, found.fit) == (plain.ds_config, plain.origins, plain.fit)
    assert read({"fit": None, "deepspeed_config": None, "torch_compile": None}).fit == plain.fit


def test_all_of_fit_is_read() -> None:
    fit = read("""
fit:
  max_length: {batches: 200}
  validation_period: {epochs: 1}
  checkpoint_period: {batches: [100, 50, 50]}
  reporting_period:
  checkpoint_policy: all
  step_zero_validation: true
  profile: {wait: 0, active: 20}
""").fit
    lengths = [
        (each.unit, each.value)
        for each in (fit.max_length, fit.validation_period, fit.checkpoint_period)
        if each
    ]
    assert lengths == [("batches", 200), ("epochs", 1), ("batches", (50, 100))]
    assert fit.reporting_period is None
    assert (fit.checkpoint_policy, fit.step_zero_validation) == ("all", True)
    assert fit.profile
    assert (fit.profile.wait, fit.profile.warmup, fit.profile.active) == (0, 2, 20)


# What is written -> the key that is named, what is said, what the fix has.
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"global_batch_size": "8"}, "global_batch_size", "must be an integer, not a string", "the quotes: 8"),
    ({"data_parallel_world_size": 8.0}, "data_parallel_world_size", "not a number", "write 8"),
    ({"pipe_parallel_size": True}, "pipe_parallel_size", "not true or false", "write an integer"),
    ({"sequence_parallel_size": 10**30}, "sequence_parallel_size", f"at most {LARGEST}", f"write at most {LARGEST}"),
    ({"zero_stage": 4}, "zero_stage", "must be at most 3", "write at most 3"),
    ({"trial_seed": LARGEST + 1}, "trial_seed", f"must be at most {LARGEST}", "write at most"),
    ({"torch_compile": "yes"}, "torch_compile", "must be true or false, not a string", "write true or false"),
    ({"pipe_schedule": "1f1c"}, "pipe_schedule", "not one of the allowed values", "did you mean 1f1b?"),
    ({"partition_method": "fastest"}, "partition_method", "", "parameters, uniform, measured"),
    ({"deepspeed_config": 1}, "deepspeed_config", "must be a string or a mapping", "write a path"),
    ({"overwrite_deepspeed_args": "a"}, "overwrite_deepspeed_args", "must be a mapping", "write a mapping"),
    ({"fit": 3}, "fit", "must be a mapping", "fit: {max_length"),
    ({"fit": {"max_lenght": {"batches": 1}}}, "fit.max_lenght", "unknown key", "'max_length'"),
    ({"fit": {"checkpoint_policy": "last"}}, "fit.checkpoint_policy", "allowed values", "best, all, none"),
    ({"fit": {"max_length": 200}}, "fit.max_length", "must be a mapping", "write {batches: N}"),
    ({"fit": {"max_length": {"batches": 0}}}, "fit.max_length.batches", "must be 1 or more", "write 1 or more"),
    ({"fit": {"reporting_period": {}}}, "fit.reporting_period", "must have one of batches, epochs", "{epochs: N}"),
    ({"fit": {"max_length": {"batches": [5]}}}, "fit.max_length.batches", "not a list", "write"),
    ({"fit": {"validation_period": {"batches": [1, None]}}}, "fit.validation_period.batches.1", "not null", "remove"),
    ({"fit": {"checkpoint_period": {"minutes": 0}}}, "fit.checkpoint_period.minutes", "more than 0", "write more"),
    ({"fit": {"checkpoint_period": {"batches": 1, "hours": 1}}}, "fit.checkpoint_period", "have one of", "batches"),
    ({"fit": {"profile": {"active": 51}}}, "fit.profile.active", "must be at most 50", "write 3 to 10"),
    ({"fit": {"profile": {"wait": 16}, "max_length": {"batches": 20}}}, "fit.profile", "needs 21 batches", "wait"),
    # An optimizer is given these, by DeepSpeed or by the trial.
    ({"learning_rate": -0.01}, "learning_rate", "must be 0 or more", "write 0 or more"),
    ({"learning_rate": "1e-3"}, "learning_rate", "must be a number or a list", "remove the quotes: 0.001"),
    ({"adam_beta1": 1.0}, "adam_beta1", "must be less than 1", "write less than 1"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "key", "said", "fix"), REFUSED)
def test_a_value_of_another_form_is_refused(source: dict[str, Any], key: str, said: str, fix: str) -> None:
    problem = refused(source)
    assert problem.key == f"hyperparameters.{key}"
    assert said in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(("unit", "seconds"), [("seconds", 2.5), ("minutes", 150), ("hours", 9000)])
def test_checkpoints_may_be_written_by_the_clock_and_nothing_else(unit: str, seconds: float) -> None:
    period: Any = read({"fit": {"checkpoint_period": {unit: 2.5}}}).fit.checkpoint_period
    assert (period.unit, period.value, period.seconds) == (unit, 2.5, seconds)
    for name in set(LENGTHS) - {"checkpoint_period"}:
        problem = refused({"fit": {name: {unit: 15}}})
        assert (problem.key, problem.code) == (f"hyperparameters.fit.{name}.{unit}", "unknown-key")
        assert problem.fix == "known here: batches, epochs"


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", OWN)
def test_a_misspelt_name_is_refused_with_the_name_that_was_meant(name: str) -> None:
    """One letter dropped, doubled or exchanged; and a pipeline written out."""
    slips = [name[:3] + name[4:], name[:3] + name[2:], name[:2] + "x" + name[3:]]
    if name in ("pipe_schedule", "pipe_chunks", "pipe_within_machine"):
        slips.append(name.replace("pipe", "pipeline"))
    for slip in slips:
        problem = refused({slip: 1})
        assert (problem.key, problem.code) == (f"hyperparameters.{slip}", "unknown-key")
        assert repr(name) in problem.fix


def test_a_name_of_the_model_is_left_to_the_model() -> None:
    for name in ("world_size", "minibatch_size", "parallel_size", "fits", "deepspeed_stage", "config", "x"):
        assert read({name: object()}).warnings == ()


@pytest.mark.parametrize(
    ("name", "real"),
    [("pipeline_parallel_size", "pipe_parallel_size"), ("train_batch_size", "global_batch_size")],
)
def test_a_hyperparameter_by_another_name_is_read_with_a_warning(name: str, real: str) -> None:
    batch = "" if real == "global_batch_size" else "global_batch_size: 8\n"
    resolved, plain = decide(f"{batch}{name}: 2"), decide(f"{batch}{real}: 2")
    assert (resolved.ds_config, resolved.topology) == (plain.ds_config, plain.topology)
    (warning,) = [warning for warning in resolved.warnings if warning.code == "other-name"]
    assert (warning.key, warning.message) == (f"hyperparameters.{name}", f"is taken as {real}")


def test_two_names_with_two_values_are_refused_with_both() -> None:
    problems, _ = told("global_batch_size: 8\npipe_parallel_size: 1\npipeline_parallel_size: 2")
    (problem,) = [problem for problem in problems if problem.code == "other-name"]
    assert problem.message == "is another name of pipe_parallel_size, which is 1 (hp.yaml:2)"
    assert problem.fix.startswith("keep ")


@pytest.mark.parametrize(
    ("name", "fix"), [("batch_size", "global_batch_size"), ("slots_per_trial", "resources.slots")]
)
def test_a_name_that_means_something_else_is_refused_with_what_to_write(name: str, fix: str) -> None:
    (problem,) = [problem for problem in told({name: 2})[0] if problem.code == "other-name"]
    assert problem.key == f"hyperparameters.{name}"
    assert fix in problem.fix


def test_two_places_that_contradict_each_other_are_both_named() -> None:
    problem = refused("overwrite_deepspeed_args: {zero_optimization: {stage: 1}}\nzero_stage: 2")
    assert (problem.key, problem.value, problem.origin) == ("hyperparameters.zero_stage", 2, "hp.yaml:2")
    assert "overwrite_deepspeed_args.zero_optimization.stage = 1 (hp.yaml:1)" in problem.message
