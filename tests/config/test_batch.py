"""global batch = micro-batch x accumulation x replicas: completed exactly, or refused with what would do."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.batch import FACTORS, NAMES, Batch, complete_batch
from determined_ds.errors import ConfigError
from tests.making import refusal

SIZES = st.integers(1, 48)
ALL = ("global_batch_size", *FACTORS)
SUBSETS = [set(names) for size in range(5) for names in itertools.combinations(ALL, size)]
# Three of the four determine the fourth. An accumulation that nobody states is 1, if one more number is then
# left to derive.
DETERMINING = [
    names for names in SUBSETS if len(names) >= 3 or (len(names) == 2 and "accumulation" not in names)
]


def product(given: dict[str, int]) -> int:
    return math.prod(given.get(name, 1) for name in FACTORS)


def feasible(given: dict[str, int]) -> bool:
    try:
        complete_batch(**given)  # type: ignore[arg-type]
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("names", DETERMINING, ids="-".join)
@given(micro=SIZES, steps=SIZES, replicas=SIZES)
def test_any_subset_that_determines_the_rest_is_completed(
    names: set[str], micro: int, steps: int, replicas: int
) -> None:
    if "accumulation" not in names and len(names) == 2:
        steps = 1
    whole = {"micro_batch_size": micro, "accumulation": steps, "replicas": replicas}
    whole["global_batch_size"] = product(whole)
    assert complete_batch(**{name: whole[name] for name in names}) == Batch(**whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "names", [n for n in SUBSETS if n not in DETERMINING], ids=lambda n: "-".join(n) or "none"
)
def test_any_other_subset_is_refused(names: set[str]) -> None:
    problem = refusal(lambda: complete_batch(**dict.fromkeys(names, 2)))  # type: ignore[arg-type]
    assert "missing" in problem.message
    assert {name for name in ALL if NAMES[name] in problem.message} >= {
        name for name in ALL if name not in names and name != "accumulation"
    }


@given(given=st.dictionaries(st.sampled_from(ALL), SIZES))
def test_nothing_is_floored(given: dict[str, int]) -> None:
    """Whatever is completed holds the product, and every number as it was stated."""
    try:
        batch = complete_batch(**given)  # type: ignore[arg-type]
    except ConfigError:
        return
    assert batch.global_batch_size == batch.micro_batch_size * batch.accumulation * batch.replicas
    assert {name: getattr(batch, name) for name in given} == given


def advised(fix: str) -> dict[str, list[int]]:
    """The numbers of a fix, by the name of the argument."""
    arguments = {name: argument for argument, name in NAMES.items()}
    found = {}
    for name, first, second in re.findall(r"(\w+_\w+) (\d+)(?: or (\d+))?", fix):
        found[arguments[name]] = [int(first), *([int(second)] if second else [])]
    return found


INCONSISTENT = st.fixed_dictionaries(
    {"global_batch_size": SIZES, "replicas": st.integers(1, 12)},
    optional={"micro_batch_size": st.integers(1, 12), "accumulation": st.integers(1, 12)},
).filter(lambda given: not feasible(given))


@given(given=INCONSISTENT)
def test_what_does_not_divide_is_refused_with_all_that_was_stated(given: dict[str, int]) -> None:
    origins = {name: f"origin of {name}" for name in given}
    problem = refusal(lambda: complete_batch(**given, origins=origins))  # type: ignore[arg-type]
    assert problem.key == "hyperparameters.global_batch_size"
    assert problem.value == given["global_batch_size"]
    assert problem.origin == origins["global_batch_size"]
    for name in FACTORS:
        said = f"{NAMES[name]} {given.get(name)} ({origins.get(name)})"
        assert (said in problem.message) == (name in given)
        assert (NAMES[name] in problem.message) == (name in given)


@given(given=INCONSISTENT)
def test_every_number_of_the_fix_is_feasible_and_the_nearest(given: dict[str, int]) -> None:
    """Each alone, all else left as it was. Where none is advised, none would do."""

    def would_do(others: dict[str, int]) -> bool:
        total, factors = others["global_batch_size"], product(others)
        return total == factors if len(others) == len(ALL) else total % factors == 0

    numbers = advised(refusal(lambda: complete_batch(**given)).fix)  # type: ignore[arg-type]
    assert "global_batch_size" in numbers
    assert all(feasible({**given, name: number}) for name in numbers for number in numbers[name])
    for name in given.keys() - {"replicas"}:
        works = [n for n in range(1, 2 * 12**3) if would_do({**given, name: n})]
        below = [n for n in works if n < given[name]]
        above = [n for n in works if n > given[name]]
        nearest = {*below[-1:], *above[:1]}
        if name == "global_batch_size":
            assert set(numbers[name]) == nearest
        elif nearest:
            (number,) = numbers[name]
            assert abs(number - given[name]) == min(abs(n - given[name]) for n in nearest)
        else:
            assert name not in numbers


def test_the_message_reads_well() -> None:
    origins = {"global_batch_size": "a.yaml:4", "micro_batch_size": "ds.json:2", "replicas": "2 slots"}
    wrong = {"global_batch_size": 9, "micro_batch_size": 2, "replicas": 2}
    assert str(refusal(lambda: complete_batch(**wrong, origins=origins))) == (  # type: ignore[arg-type]
        "hyperparameters.global_batch_size = 9 (a.yaml:4): is not a multiple of"
        " train_micro_batch_size_per_gpu 2 (ds.json:2) x data_parallel_world_size 2 (2 slots) = 4\n"
        "  fix: use global_batch_size 8 or 12"
    )
    assert refusal(lambda: complete_batch(global_batch_size=9, replicas=2, origins=origins)).message == (
        "is not a multiple of data_parallel_world_size 2 (2 slots)"
    )


HUGE = st.integers(1, 10**18)


@given(given=st.dictionaries(st.sampled_from(ALL), HUGE))
def test_no_number_is_too_large_to_decide(given: dict[str, Any]) -> None:
    if not feasible(given):
        refusal(lambda: complete_batch(**given))


@pytest.mark.parametrize("total", [10**18, 10**18 - 11, 2**31 - 1, 10**12])
def test_a_large_number_with_few_divisors_is_refused_as_any_other(total: int) -> None:
    problem = refusal(lambda: complete_batch(global_batch_size=total, micro_batch_size=10**6 + 3, replicas=1))
    for number in advised(problem.fix)["global_batch_size"]:
        assert feasible({"global_batch_size": number, "micro_batch_size": 10**6 + 3, "replicas": 1})


@pytest.mark.parametrize("wrong", [{"accumulation": 2}, {"replicas": 0, "global_batch_size": 0}])
def test_a_batch_that_is_none_is_our_own_mistake(wrong: dict[str, int]) -> None:
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "accumulation": 1, "replicas": 2}
    with pytest.raises(AssertionError):
        Batch(**{**sizes, **wrong})
