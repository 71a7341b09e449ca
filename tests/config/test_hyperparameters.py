"""The hyperparameters that the library reads: typed, in range, by their names, and no misspelt one is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Problem, ResolvedConfig
from tests.config.deciding import nested
from tests.package import decide, own_hyperparameters, refusal

OWN = [name for name in own_hyperparameters() if "." not in name and name != "fit"]


def read(source: str | dict[str, Any]) -> ResolvedConfig:
    """Hyperparameters beside a JSON that states the batch, on eight ranks."""
    return decide(source, {"train_batch_size": 8}, slots=8)


def refused(source: str | dict[str, Any]) -> Problem:
    return refusal(lambda: read(source))


def test_null_and_auto_are_as_absent_and_a_name_of_the_model_is_left_to_the_model() -> None:
    plain = read({})
    sizes = ("global_batch_size", "pipe_parallel_size", "zero_stage", "micro_batch_size", "trial_seed")
    absent = [{name: nothing} for name in sizes for nothing in (None, "auto")]
    absent += [{name: None} for name in ("fit", "deepspeed_config", "torch_compile", "logging")]
    for hp in absent:
        found = read(hp)
        assert (found.ds_config, found.origins, found.fit) == (plain.ds_config, plain.origins, plain.fit)
    names = ("world_size", "minibatch_size", "parallel_size", "fits", "deepspeed_stage", "config", "x")
    assert read(dict.fromkeys(names, object())).warnings == ()


# Dotted key, what is written there -> what the fix says.
REFUSED: list[tuple[str, Any, str]] = [
    ("data_parallel_world_size", 8.0, "write an integer"),
    ("torch_compile", "yes", "write true or false"),
    ("pipe_schedule", "1f1c", "did you mean 1f1b?"),
    ("fit.max_lenght", {"batches": 1}, "'max_length'"),
    ("fit.max_length.batches", 0, "write 1 or more"),
    ("fit.checkpoint_period", {"batches": 1, "hours": 1}, "write {batches: N}"),
    ("fit", {"profile": {"wait": 16}, "max_length": {"batches": 20}}, "lower wait"),
    ("learning_rate", "1e-3", "a number"),  # an optimizer is given it, by DeepSpeed or by the trial
    ("logging.wandb.api_key", "s3cret", "WANDB_API_KEY in the environment"),
]


@pytest.mark.parametrize(("key", "wrong", "fix"), REFUSED)
def test_a_value_of_another_form_is_refused(key: str, wrong: Any, fix: str) -> None:
    problem = refused(nested(key, wrong))
    assert f"{problem.key}.".startswith(f"hyperparameters.{key}.")
    assert fix in problem.fix
    assert "s3cret" not in str(problem)


def test_a_misspelt_name_is_refused_with_the_name_that_was_meant() -> None:
    """One letter dropped, doubled or exchanged."""
    for name in OWN:
        for slip in (name[:3] + name[4:], name[:3] + name[2:], name[:2] + "x" + name[3:]):
            problem = refused({slip: 1})
            assert (problem.key, problem.code) == (f"hyperparameters.{slip}", "unknown-key")
            assert repr(name) in problem.fix


def test_a_hyperparameter_by_another_name_is_read_with_a_warning_or_refused() -> None:
    resolved, plain = read({"train_batch_size": 8}), read({"global_batch_size": 8})
    assert resolved.ds_config == plain.ds_config
    (warning,) = [warning for warning in resolved.warnings if warning.code == "other-name"]
    assert (warning.key, warning.fix) == ("hyperparameters.train_batch_size", "write global_batch_size")
    problem = refused({"batch_size": 2})
    assert (problem.key, problem.code) == ("hyperparameters.batch_size", "other-name")


def test_two_places_that_contradict_each_other_are_both_named() -> None:
    problem = refused("overwrite_deepspeed_args: {zero_optimization: {stage: 1}}\nzero_stage: 2")
    assert (problem.key, problem.value, problem.origin) == ("hyperparameters.zero_stage", 2, "hp.yaml:2")
    assert "overwrite_deepspeed_args.zero_optimization.stage = 1 (hp.yaml:1)" in problem.message
