"""The hyperparameters that the library reads: typed, in range, by their names, and no misspelt one is ignored."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Problem, ResolvedConfig
from tests.config.deciding import nested
from tests.package import ROOT, check, decide, own_hyperparameters, refusal

LARGEST = 2**31 - 1
OWN = [name for name in own_hyperparameters() if "." not in name and name != "fit"]


def read(source: str | dict[str, Any]) -> ResolvedConfig:
    """Hyperparameters beside a JSON that states the batch, on eight ranks."""
    return decide(source, {"train_batch_size": 8}, slots=8)


def refused(source: str | dict[str, Any]) -> Problem:
    return refusal(lambda: read(source))


def test_null_and_auto_are_as_absent() -> None:
    plain = read({})
    sizes = ("global_batch_size", "pipe_parallel_size", "zero_stage", "micro_batch_size", "trial_seed")
    absent = [{name: nothing} for name in sizes for nothing in (None, "auto")]
    absent += [{name: None} for name in ("fit", "deepspeed_config", "torch_compile", "logging")]
    for hp in absent:
        found = read(hp)
        assert (found.ds_config, found.origins, found.fit) == (plain.ds_config, plain.origins, plain.fit)


def test_all_of_fit_is_read() -> None:
    fit = read("""
fit:
  max_length: {batches: 200}
  validation_period: {epochs: [3, 1, 1]}
  checkpoint_period: {minutes: 2.5}
  reporting_period:
  checkpoint_policy: all
  step_zero_validation: true
  profile: {wait: 0, active: 20}
""").fit
    lengths: Any = (fit.max_length, fit.validation_period, fit.checkpoint_period)
    found = [(each.unit, each.value) for each in lengths]
    assert found == [("batches", 200), ("epochs", (1, 3)), ("minutes", 2.5)]
    assert lengths[2].seconds == 150
    assert (fit.reporting_period, fit.checkpoint_policy, fit.step_zero_validation) == (None, "all", True)
    assert fit.profile
    assert (fit.profile.wait, fit.profile.warmup, fit.profile.active) == (0, 2, 20)


# Dotted key, what is written there -> what the fix says.
REFUSED: list[tuple[str, Any, str]] = [
    ("data_parallel_world_size", 8.0, "write an integer"),
    ("sequence_parallel_size", 10**30, f"write at most {LARGEST}"),
    ("torch_compile", "yes", "write true or false"),
    ("pipe_schedule", "1f1c", "did you mean 1f1b?"),
    ("partition_method", "fastest", "parameters, uniform, measured"),
    ("deepspeed_config", 1, "write a path"),
    ("fit", 3, "fit: {max_length"),
    ("fit.max_lenght", {"batches": 1}, "'max_length'"),
    ("fit.checkpoint_policy", "last", "best, all, none"),
    ("fit.max_length.batches", 0, "write 1 or more"),
    ("fit.max_length.minutes", 15, "batches, epochs"),
    ("fit.validation_period.batches", [1, None], "remove it"),
    ("fit.checkpoint_period", {"batches": 1, "hours": 1}, "write {batches: N}"),
    ("fit.profile.active", 51, "write 3 to 10"),
    ("fit", {"profile": {"wait": 16}, "max_length": {"batches": 20}}, "lower wait"),
    # An optimizer is given these, by DeepSpeed or by the trial.
    ("learning_rate", "1e-3", "without quotes"),
    # What is not an option of a tool's client
    ("logging", "wandb", "write logging: {wandb: "),
    ("logging.wnadb", {}, "'wandb'"),
    ("logging.wandb.projct", "x", "'project'"),
    ("logging.mlflow.tags.a", [1], "write a string"),
]


@pytest.mark.parametrize(("key", "wrong", "fix"), REFUSED)
def test_a_value_of_another_form_is_refused(key: str, wrong: Any, fix: str) -> None:
    problem = refused(nested(key, wrong))
    assert f"{problem.key}.".startswith(f"hyperparameters.{key}.")
    assert fix in problem.fix


def test_a_key_of_a_tool_is_refused_and_not_shown() -> None:
    problem = refused(nested("logging.wandb.api_key", "anything"))
    assert "WANDB_API_KEY in the environment" in problem.fix
    assert "anything" not in str(problem)


def test_mlflow_without_a_server_is_warned_of_on_a_cluster() -> None:
    """What it writes would lie in a container."""

    def findings(*overrides: str) -> list[tuple[str, str]]:
        (report,) = check([ROOT / "experiments/gpt2/const.yaml"], context_dir=ROOT, overrides=overrides)
        return [(found.problem.key, found.problem.code) for found in report.findings]

    mlflow = "hyperparameters.logging.mlflow=true"
    assert findings(mlflow) == [("hyperparameters.logging.mlflow", "logger-server")]
    server = 'environment.environment_variables=["MLFLOW_TRACKING_URI=http://mlflow:5000"]'
    assert findings(mlflow, server) == []


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
    names = ("world_size", "minibatch_size", "parallel_size", "fits", "deepspeed_stage", "config", "x")
    assert read(dict.fromkeys(names, object())).warnings == ()


def test_a_hyperparameter_by_another_name_is_read_with_a_warning() -> None:
    for name, real in {
        "pipeline_parallel_size": "pipe_parallel_size",
        "train_batch_size": "global_batch_size",
    }.items():
        resolved, plain = read({name: 8}), read({real: 8})
        assert (resolved.ds_config, resolved.topology) == (plain.ds_config, plain.topology)
        (warning,) = [warning for warning in resolved.warnings if warning.code == "other-name"]
        assert (warning.key, warning.fix) == (f"hyperparameters.{name}", f"write {real}")


def test_a_name_that_means_something_else_is_refused_with_what_to_write() -> None:
    for name, fix in {"batch_size": "global_batch_size", "slots_per_trial": "resources.slots"}.items():
        problem = refused({name: 2})
        assert (problem.key, problem.code) == (f"hyperparameters.{name}", "other-name")
        assert fix in problem.fix


def test_two_places_that_contradict_each_other_are_both_named() -> None:
    problem = refused("overwrite_deepspeed_args: {zero_optimization: {stage: 1}}\nzero_stage: 2")
    assert (problem.key, problem.value, problem.origin) == ("hyperparameters.zero_stage", 2, "hp.yaml:2")
    assert "overwrite_deepspeed_args.zero_optimization.stage = 1 (hp.yaml:1)" in problem.message
