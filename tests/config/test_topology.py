"""slots = pipe x model x sequence x data, exactly, or refused with sizes that would do."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.topology import Topology, nearest_divisor, resolve_topology
from tests.making import refusal

SIZES = st.integers(1, 64)
HUGE = st.integers(1, 10**18)


# Degrees that are divided -> where eight ranks stand, as the letter of a stage, a sequence's slice or a layer's part
# and the number of a replica.
LAYOUTS = [
    ({"pipe": 2}, False, "p0d0 p0d1 p0d2 p0d3 p1d0 p1d1 p1d2 p1d3"),
    ({"pipe": 2}, True, "p0d0 p1d0 p0d1 p1d1 p0d2 p1d2 p0d3 p1d3"),
    ({"pipe": 2, "model": 2}, False, "p0d0m0 p0d0m1 p0d1m0 p0d1m1 p1d0m0 p1d0m1 p1d1m0 p1d1m1"),
    ({"pipe": 2, "model": 2}, True, "p0d0m0 p0d0m1 p1d0m0 p1d0m1 p0d1m0 p0d1m1 p1d1m0 p1d1m1"),
    ({"sequence": 2}, False, "d0s0 d0s1 d1s0 d1s1 d2s0 d2s1 d3s0 d3s1"),
]


@pytest.mark.parametrize(("degrees", "within", "places"), LAYOUTS)
def test_where_eight_ranks_stand(degrees: dict[str, int], within: bool, places: str) -> None:
    sizes = {f"{name}_parallel_size": size for name, size in degrees.items()}
    layout = resolve_topology(slots=8, **sizes, pipe_within_machine=within)
    found = [layout.coordinates(rank) for rank in range(8)]
    order = sorted([*degrees, "data"], key=["pipe", "data", "sequence", "model"].index)
    assert [("".join(f"{name[0]}{place[name]}" for name in order)) for place in found] == places.split()


@given(pipe=SIZES, model=SIZES, sequence=SIZES, data=SIZES)
def test_the_slots_are_the_product(pipe: int, model: int, sequence: int, data: int) -> None:
    slots = pipe * model * sequence * data
    sizes = {
        "pipe_parallel_size": pipe,
        "model_parallel_size": model,
        "sequence_parallel_size": sequence,
    }
    derived = resolve_topology(slots=slots, **sizes)
    assert derived == resolve_topology(slots=slots, **sizes, data_parallel_world_size=data)
    assert derived == Topology(**sizes, data_parallel_world_size=data)
    assert derived.slots == slots


@given(slots=SIZES, pipe=st.integers(1, 8), model=st.integers(1, 8), sequence=st.integers(1, 8))
def test_what_does_not_divide_is_refused_with_what_would(
    slots: int, pipe: int, model: int, sequence: int
) -> None:
    """Every number of the fix runs, all else left alone; and of each kind, none that runs is nearer."""
    sizes = {
        "pipe_parallel_size": pipe,
        "model_parallel_size": model,
        "sequence_parallel_size": sequence,
    }
    per_replica = pipe * model * sequence
    if slots % per_replica == 0:
        return
    problem = refusal(lambda: resolve_topology(slots=slots, **sizes))
    assert (problem.key, problem.value, problem.code) == ("slots_per_trial", slots, "topology")
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
    assert f"{layout} = {per_replica}" in problem.message

    numbers = re.search(r"use (?:(\d+) or )?(\d+) slots", problem.fix)
    assert numbers
    feasible = [n for n in range(1, 1100) if n % per_replica == 0]
    below = [n for n in feasible if n < slots]
    assert numbers.group(1) == (str(below[-1]) if below else None)
    assert int(numbers.group(2)) == next(n for n in feasible if n > slots)

    for name, size in sizes.items():
        other = per_replica // size
        advised = re.search(rf"{name} (\d+)", problem.fix)
        works = [n for n in range(1, slots + 1) if slots % (n * other) == 0]
        if advised:
            assert abs(int(advised.group(1)) - size) == min(abs(n - size) for n in works)
        else:
            assert not works or size == 1


@given(slots=SIZES, data=st.integers(1, 200))
def test_replicas_that_are_not_there_are_refused_with_those_that_are(slots: int, data: int) -> None:
    if data == slots:
        return
    problem = refusal(lambda: resolve_topology(slots=slots, data_parallel_world_size=data))
    assert (problem.key, problem.value) == ("hyperparameters.data_parallel_world_size", data)
    replicas, advised = map(int, re.findall(r"\d+", problem.fix))
    assert resolve_topology(slots=slots, data_parallel_world_size=replicas).slots == slots
    assert resolve_topology(slots=advised, data_parallel_world_size=data).slots == advised


def test_every_size_is_told_with_its_origin() -> None:
    origins = {"slots": "--slots", "pipe_parallel_size": "a.yaml:7", "data_parallel_world_size": "a.yaml:8"}
    assert str(refusal(lambda: resolve_topology(slots=5, pipe_parallel_size=2, origins=origins))) == (
        "slots_per_trial = 5 (--slots): pipe_parallel_size 2 (a.yaml:7) x model_parallel_size 1"
        " x sequence_parallel_size 1 = 2 slots a replica, which does not divide 5 slots"
        "\n  fix: use 4 or 6 slots, or pipe_parallel_size 1"
    )
    wrong = {"slots": 4, "pipe_parallel_size": 2, "data_parallel_world_size": 4}
    assert str(refusal(lambda: resolve_topology(**wrong, origins=origins))) == (
        "hyperparameters.data_parallel_world_size = 4 (a.yaml:8): 4 slots (--slots) / (pipe_parallel_size 2"
        " (a.yaml:7) x model_parallel_size 1 x sequence_parallel_size 1) make 2 replicas"
        "\n  fix: write 2 or auto, or use 8 slots"
    )


@given(slots=HUGE, pipe=HUGE, model=HUGE)
def test_no_number_is_too_large_to_decide(slots: int, pipe: int, model: int) -> None:
    sizes = {"pipe_parallel_size": pipe, "model_parallel_size": model}
    if pipe * model > 1:
        refusal(lambda: resolve_topology(slots=slots * pipe * model + 1, **sizes))
    assert resolve_topology(slots=slots * pipe * model, **sizes).data_parallel_world_size == slots


@pytest.mark.parametrize(("number", "to"), [*itertools.product([1, 2, 12, 13, 36, 97], [1, 5, 7, 100])])
def test_nearest_divisor(number: int, to: int) -> None:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    assert nearest_divisor(number, to) == min(divisors, key=lambda n: (abs(n - to), n))


def test_what_takes_long_to_factor_is_not_factored() -> None:
    assert nearest_divisor(10**18, 3) is None
