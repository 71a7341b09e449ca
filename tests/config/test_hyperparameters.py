"""The hyperparameters that the library reads: typed, in range, and no slip of the keyboard passed over."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.fit_options import LENGTHS, ONLY_COUNTED, TIME_UNITS, Duration, FitOptions, Length
from determined_ds.config.hyperparameters import (
    OWN_KEYS,
    SHORTHANDS,
    SIZES,
    Hyperparameters,
    parse_hyperparameters,
    read_hyperparameters,
)
from determined_ds.config.numbers import LARGEST
from tests.making import hyperparameters, refusal, refusals


def parse(source: str | dict[str, Any]) -> Hyperparameters:
    return parse_hyperparameters(hyperparameters(source))


def test_what_is_absent_is_derived_or_one() -> None:
    assert parse({}) == Hyperparameters()
    assert parse({"pipe_parallel_size": None, "fit": None, "deepspeed_config": None}) == Hyperparameters()
    assert Hyperparameters().pipe_parallel_size == Hyperparameters().model_parallel_size == 1


def test_all_that_is_read() -> None:
    read = parse("""
global_batch_size: 32
data_parallel_world_size: auto
pipe_parallel_size: 2
model_parallel_size: 1
deepspeed_config: ds.json
overwrite_deepspeed_args: {zero_optimization: {stage: 1}}
zero_stage: 1
micro_batch_size: 4
trial_seed: 0
torch_compile: true
fit:
  max_length: {batches: 200}
  validation_period: {epochs: 1}
  checkpoint_period: {batches: [100, 50, 50]}
  reporting_period:
  checkpoint_policy: all
  step_zero_validation: true
model_size: tiny
""")
    assert read == Hyperparameters(
        global_batch_size=32,
        pipe_parallel_size=2,
        deepspeed_config="ds.json",
        overwrite_deepspeed_args={"zero_optimization": {"stage": 1}},
        zero_stage=1,
        micro_batch_size=4,
        trial_seed=0,
        torch_compile=True,
        fit=FitOptions(
            max_length=Length(unit="batches", value=200),
            validation_period=Length(unit="epochs", value=1),
            checkpoint_period=Length(unit="batches", value=(50, 100)),
            checkpoint_policy="all",
            step_zero_validation=True,
        ),
    )
    assert {field.name for field in fields(Hyperparameters)} == set(OWN_KEYS)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("value", "said", "fix"),
    [
        ("8", "must be an integer, not a string", "remove the quotes: 8"),
        ("8.0", "must be an integer, not a string", "remove the quotes: 8"),
        ("eight", "must be an integer, not a string", "write an integer"),
        ("9" * 400, "must be an integer, not a string", "write an integer"),
        (8.0, "must be an integer, not a number", "write 8"),
        (8.5, "must be an integer, not a number", "write an integer"),
        (True, "must be an integer, not true or false", "write an integer"),
        ([8], "must be an integer, not a list", "write an integer"),
        ({"a": 8}, "must be an integer, not a mapping", "write an integer"),
        (0, "must be 1 or more", "write a positive number"),
        (-8, "must be 1 or more", "write a positive number"),
        (LARGEST + 1, f"must be at most {LARGEST}", "write a smaller number"),
    ],
)
def test_a_size_is_a_positive_integer(name: str, value: Any, said: str, fix: str) -> None:
    problem = refusal(lambda: parse({name: value}))
    assert (problem.key, problem.value, problem.message, problem.fix) == (
        f"hyperparameters.{name}",
        value,
        said,
        fix,
    )


@pytest.mark.parametrize("value", ["fastest", "type:(", "type:(?:a|b)", 3, True, ["uniform"]])
def test_layers_are_shared_out_by_a_known_method(value: Any) -> None:
    problem = refusal(lambda: parse({"partition_method": value}))
    assert (problem.key, problem.code) == ("hyperparameters.partition_method", "partition-method")
    assert "parameters, uniform, measured" in problem.fix
    assert parse({"partition_method": "type:Block"}).partition_method == "type:Block"
    assert parse({"partition_method": "auto"}) == parse({"partition_method": None}) == Hyperparameters()


@pytest.mark.parametrize(("value", "kind"), [("yes", "a string"), (1, "an integer"), ([True], "a list")])
def test_torch_compile_is_true_or_false(value: Any, kind: str) -> None:
    problem = refusal(lambda: parse({"torch_compile": value}))
    assert (problem.key, problem.code) == ("hyperparameters.torch_compile", "wrong-type")
    assert problem.message == f"must be true or false, not {kind}"
    assert problem.fix == "write true or false"
    assert parse({"torch_compile": None}) == parse({"torch_compile": False}) == Hyperparameters()


@given(st.integers(1, LARGEST))
def test_any_positive_integer_is_a_size(value: int) -> None:
    assert parse({"global_batch_size": value}).global_batch_size == value


@pytest.mark.parametrize("name", [name for name in OWN_KEYS if name != "fit"])
def test_a_slip_of_the_keyboard_is_refused(name: str) -> None:
    """One letter dropped, doubled or exchanged: the name that was meant is told."""
    for slip in (name[:3] + name[4:], name[:3] + name[2:], name[:2] + "x" + name[3:]):
        problem = refusal(lambda slip=slip: parse({slip: 1}))
        assert (problem.key, problem.code) == (f"hyperparameters.{slip}", "unknown-key")
        assert repr(name) in problem.fix


@pytest.mark.parametrize(
    "name",
    """learning_rate batch_size world_size minibatch_size hidden_size num_layers parallel_size fits dropout
    deepspeed deepspeed_stage config model_size data_path overwrite x""".split(),  # noqa: SIM905
)
def test_a_name_of_the_model_is_left_to_the_model(name: str) -> None:
    assert parse({name: object()}) == Hyperparameters()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_stage": 4}, "must be at most 3"),
        ({"zero_stage": -1}, "must be 0 or more"),
        ({"zero_stage": True}, "must be an integer, not true or false"),
        ({"zero_stage": "2"}, "must be an integer, not a string"),
        ({"micro_batch_size": 0}, "must be 1 or more"),
        ({"trial_seed": -1}, "must be 0 or more"),
        ({"trial_seed": 2**31}, f"must be at most {LARGEST}"),
        ({"trial_seed": 0.5}, "must be an integer, not a number"),
    ],
)
def test_a_number_of_the_librarys_own_lies_in_its_range(given: dict[str, Any], said: str) -> None:
    [problem] = refusals(lambda: parse(given))
    assert problem.key == f"hyperparameters.{next(iter(given))}"
    assert problem.message == said
    assert problem.fix


@pytest.mark.parametrize("nothing", [None, "auto"])
@pytest.mark.parametrize("name", [*SHORTHANDS, "trial_seed"])
def test_nothing_is_laid_over_by_what_says_nothing(name: str, nothing: Any) -> None:
    assert parse({name: nothing}) == Hyperparameters()


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (
            "{zero_optimization: {stage: 1}}",
            "overwrite_deepspeed_args.zero_optimization.stage = 1 (hp.yaml:1)",
        ),
        ("{zero_optimization: true}", "overwrite_deepspeed_args.zero_optimization.stage = true (hp.yaml:1)"),
    ],
)
def test_two_places_that_say_different_things_are_both_named(over: str, said: str) -> None:
    [problem] = refusals(lambda: parse(f"overwrite_deepspeed_args: {over}\nzero_stage: 2"))
    assert (problem.key, problem.value, problem.origin) == ("hyperparameters.zero_stage", 2, "hp.yaml:2")
    assert problem.message == f"differs from {said}"
    assert "keep one of them" in problem.fix


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    ("value", "key", "said", "fix"),
    [
        (200, "", "must be a mapping", "write {batches: 200}"),
        (0, "", "must be a mapping", "write {batches: N} or {epochs: N}"),
        (True, "", "must be a mapping", "write {batches: N} or {epochs: N}"),
        ("200", "", "must be a mapping", "write {batches: N} or {epochs: N}"),
        ({}, "", "neither batches nor epochs", "write {batches: N} or {epochs: N}"),
        ({"batches": None}, "", "neither batches nor epochs", "write {batches: N} or {epochs: N}"),
        ({"batches": 1, "epochs": 1}, "", "both batches and epochs", "keep one"),
        ({"batch": 1}, ".batch", "unknown key", "'batches'"),
        ({"batches": 0}, ".batches", "must be 1 or more", "positive"),
        ({"epochs": "3"}, ".epochs", "must be an integer, not a string", "remove the quotes: 3"),
        ({"epochs": 0.5}, ".epochs", "must be an integer, not a number", "write an integer"),
        ({"batches": "auto"}, ".batches", "must be an integer, not a string", "write an integer"),
        ({"batches": LARGEST + 1}, ".batches", "must be at most", "smaller"),
    ],
)
def test_a_length_is_a_number_of_batches_or_epochs(
    name: str, value: Any, key: str, said: str, fix: str
) -> None:
    problem = refusal(lambda: parse({"fit": {name: value}}))
    assert problem.key == f"hyperparameters.fit.{name}{key}"
    assert said in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(("unit", "seconds"), [("seconds", 2.5), ("minutes", 150), ("hours", 9000)])
def test_checkpoints_may_be_written_by_the_clock(unit: str, seconds: float) -> None:
    period = parse({"fit": {"checkpoint_period": {unit: 2.5}}}).fit.checkpoint_period
    assert isinstance(period, Duration)
    assert period == Duration(unit=unit, value=2.5)
    assert period.seconds == seconds


@pytest.mark.parametrize(
    ("value", "key", "said", "fix"),
    [
        ({"minuts": 15}, ".minuts", "unknown key", "'minutes'"),
        ({"hour": 1}, ".hour", "unknown key", "'hours'"),
        ({"minutes": 0}, ".minutes", "must be more than 0", "{minutes: 15}"),
        ({"minutes": -1.5}, ".minutes", "must be more than 0", "{minutes: 15}"),
        ({"minutes": float("nan")}, ".minutes", "must be more than 0", "{minutes: 15}"),
        ({"minutes": True}, ".minutes", "must be a number", "{minutes: 15}"),
        ({"minutes": "15"}, ".minutes", "must be a number", "{minutes: 15}"),
        ({"minutes": [15]}, ".minutes", "must be a number", "{minutes: 15}"),
        ({"batches": 100, "minutes": 15}, "", "both batches and minutes", "minutes=null"),
        ({"seconds": 30, "minutes": 15}, "", "both seconds and minutes", "keep one"),
    ],
)
def test_a_period_by_the_clock_is_one_positive_number(value: Any, key: str, said: str, fix: str) -> None:
    problem = refusal(lambda: parse({"fit": {"checkpoint_period": value}}))
    assert problem.key == f"hyperparameters.fit.checkpoint_period{key}"
    assert said in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize("unit", TIME_UNITS)
@pytest.mark.parametrize("name", ONLY_COUNTED)
def test_nothing_else_goes_by_the_clock_and_the_message_says_why(name: str, unit: str) -> None:
    problem = refusal(lambda: parse({"fit": {name: {unit: 15}}}))
    assert problem.key == f"hyperparameters.fit.{name}.{unit}"
    assert problem.message == f"cannot be in {unit}: {ONLY_COUNTED[name]}"
    assert problem.fix == "write {batches: N} or {epochs: N}"


def test_of_two_periods_the_one_from_the_command_line_is_kept() -> None:
    """An experiment has batches, and --set adds minutes."""
    document = hyperparameters("fit: {checkpoint_period: {batches: 100}}")
    document = document.overwritten(("fit", "checkpoint_period", "minutes"), 15, "--set")
    [problem] = refusals(lambda: parse_hyperparameters(document))
    assert problem.fix.endswith("--set hyperparameters.fit.checkpoint_period.batches=null removes the other")


@pytest.mark.parametrize(
    ("schedule", "key"),
    [([], ""), ([5, 0], ".1"), (["auto"], ".0"), ([None], ".0"), ([5, [6]], ".1"), ([1.5], ".0")],
)
def test_a_schedule_is_a_list_of_such_numbers(schedule: list[Any], key: str) -> None:
    problem = refusal(lambda: parse({"fit": {"validation_period": {"batches": schedule}}}))
    assert problem.key == f"hyperparameters.fit.validation_period.batches{key}"


def test_the_whole_length_is_no_schedule() -> None:
    assert "not a list" in refusal(lambda: parse({"fit": {"max_length": {"batches": [5]}}})).message


@pytest.mark.parametrize(
    ("source", "key", "said", "fix"),
    [
        ({"fit": 3}, "fit", "must be a mapping", "fit: {max_length"),
        ({"fit": {"max_lenght": {"batches": 1}}}, "fit.max_lenght", "unknown key", "'max_length'"),
        (
            {"fit": {"checkpoint_policy": "last"}},
            "fit.checkpoint_policy",
            "not a valid checkpoint policy",
            "best, all, none",
        ),
        (
            {"fit": {"checkpoint_policy": []}},
            "fit.checkpoint_policy",
            "not a valid checkpoint policy",
            "best, all, none",
        ),
        (
            {"fit": {"warm_start": "optimizer"}},
            "fit.warm_start",
            "not a valid warm start",
            "weights, all",
        ),
        (
            {"fit": {"step_zero_validation": 1}},
            "fit.step_zero_validation",
            "must be true or false",
            "write true",
        ),
        ({"deepspeed_config": 1}, "deepspeed_config", "must be a path or a mapping", "write a path"),
        ({"deepspeed_config": ["a"]}, "deepspeed_config", "must be a path or a mapping", "write a path"),
        ({"overwrite_deepspeed_args": "a"}, "overwrite_deepspeed_args", "must be a mapping", "{stage: 2}"),
    ],
)
def test_what_is_of_another_form_is_refused(source: dict[str, Any], key: str, said: str, fix: str) -> None:
    problem = refusal(lambda: parse(source))
    assert problem.key == f"hyperparameters.{key}"
    assert said in problem.message
    assert fix in problem.fix


def test_all_that_is_wrong_is_told_at_once_with_its_line() -> None:
    text = "global_batch_size: '8'\npipe_parallel_size: 0\nfit:\n  max_length: 5\n  policy: best\ndeepspeed_config: 1"
    problems = refusals(lambda: parse(text))
    assert {(problem.key.removeprefix("hyperparameters."), problem.origin) for problem in problems} == {
        ("global_batch_size", "hp.yaml:1"),
        ("pipe_parallel_size", "hp.yaml:2"),
        ("fit.max_length", "hp.yaml:4"),
        ("fit.policy", "hp.yaml:5"),
        ("deepspeed_config", "hp.yaml:6"),
    }


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("auto"),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["batches", "epochs"]), inner)
    ),
    max_leaves=4,
)
FIT = st.dictionaries(st.sampled_from([*FitOptions.__dataclass_fields__, "other"]), ANYTHING, max_size=3)


@given(st.dictionaries(st.sampled_from(OWN_KEYS), ANYTHING, max_size=3), FIT)
def test_whatever_is_written_is_read_or_refused(data: dict[str, Any], fit: dict[str, Any]) -> None:
    """What is wrong is taken as absent, so that the rest can still be looked at."""
    read, problems = read_hyperparameters(hyperparameters({**data, "fit": fit}))
    for name in SIZES:
        size = getattr(read, name)
        assert size is None or 1 <= size <= LARGEST
    for problem in problems:
        assert problem.key.startswith("hyperparameters.")
        assert problem.fix
        assert str(problem)
