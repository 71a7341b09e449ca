"""slots = pipe x model x sequence x data, and batch = micro-batch x accumulation x data: exactly, or refused.

Every number that a refusal suggests works, all else left as it was, and none that works is nearer.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import Accelerator, Problem
from tests.config.deciding import told
from tests.package import decide

SIZES = st.integers(1, 48)
HUGE = st.integers(1, 2**31 - 1)
MANY = Accelerator(name="cuda", num_devices=10**18, bf16=True, fp16=True)
# A hyperparameter, or a key of the JSON -> the attribute of what is decided.
BATCH = {
    "global_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation",
}
DEGREES = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size")
Numbers = dict[str, int]


def problem_of(code: str, hp: Numbers, ds: Numbers, slots: int) -> Problem | None:
    """What is wrong with sizes of a kind, if anything."""
    problems, _ = told(hp, ds, slots=slots, accelerator=MANY)
    found = [problem for problem in problems if problem.code.startswith(code)]
    assert len(found) <= 1
    return found[0] if found else None


def batch_problem(stated: Numbers, slots: int) -> Problem | None:
    ds = {name: number for name, number in stated.items() if name != "global_batch_size"}
    hp = {name: number for name, number in stated.items() if name not in ds}
    return problem_of("batch", hp, ds, slots)


# ------------------------------------------------------------------------------------------------- the batch


@pytest.mark.parametrize(
    "names",
    [set(names) for size in (1, 2, 3) for names in itertools.combinations(BATCH, size)],
    ids=lambda names: "-".join(sorted(names)),
)
@given(micro=SIZES, steps=SIZES, replicas=SIZES)
def test_numbers_that_determine_the_rest_are_completed(
    names: set[str], micro: int, steps: int, replicas: int
) -> None:
    """An accumulation that nobody states is 1."""
    if names == {"gradient_accumulation_steps"}:
        problem = batch_problem({"gradient_accumulation_steps": steps}, replicas)
        assert problem
        assert "missing" in problem.message
        return
    if "gradient_accumulation_steps" not in names and len(names) == 1:
        steps = 1
    whole = dict(zip(BATCH, (micro * steps * replicas, micro, steps), strict=True))
    hp = {name: whole[name] for name in names & {"global_batch_size"}}
    ds = {name: whole[name] for name in names - {"global_batch_size"}}
    batch = decide(hp, ds, slots=replicas, accelerator=MANY).batch
    assert {name: getattr(batch, attribute) for name, attribute in BATCH.items()} == whole
    assert batch.replicas == replicas


INCONSISTENT = st.fixed_dictionaries(
    {"global_batch_size": SIZES}, optional={name: st.integers(1, 12) for name in (*BATCH,)[1:]}
)


def nearest(works: list[int], to: int) -> set[int]:
    """The nearest below, and the nearest above."""
    below, above = [n for n in works if n < to], [n for n in works if n > to]
    return {*below[-1:], *above[:1]}


@given(stated=INCONSISTENT, replicas=st.integers(1, 12))
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(
    stated: Numbers, replicas: int
) -> None:
    problem = batch_problem(stated, replicas)
    total, factors = stated["global_batch_size"], replicas
    for name in stated.keys() - {"global_batch_size"}:
        factors *= stated[name]
    fits = total == factors if len(stated) == len(BATCH) else total % factors == 0
    assert (problem is None) == fits
    if problem is None:
        return
    assert (problem.key, problem.value) == ("hyperparameters.global_batch_size", total)
    for name in (*BATCH,)[1:]:
        assert (f"{name} {stated.get(name)} (ds.json)" in problem.message) == (name in stated)
    advised = {
        name: {int(n) for n in (first, second) if n}
        for name, first, second in re.findall(r"(\w+_\w+) (\d+)(?: or (\d+))?", problem.fix)
    }
    assert "global_batch_size" in advised
    for name in advised.keys() & stated.keys():
        assert all(batch_problem({**stated, name: number}, replicas) is None for number in advised[name])
    for name, number in stated.items():
        others = factors if name == "global_batch_size" else factors // number
        if name == "global_batch_size":
            is_exact = len(stated) == len(BATCH)
            works = [factors] if is_exact else [others * n for n in range(1, total // others + 2)]
            assert advised[name] == nearest(works, number)
        else:
            is_exact = len(stated) == len(BATCH)
            works = [
                n
                for n in range(1, total + 1)
                if (n * others == total if is_exact else total % (n * others) == 0)
            ]
            near = nearest(works, number)
            assert bool(near) == (name in advised)
            if near:
                (found,) = advised[name]
                assert abs(found - number) == min(abs(n - number) for n in near)


# --------------------------------------------------------------------------------------------- the topology


@given(pipe=st.integers(1, 8), model=SIZES, data=SIZES)
def test_the_slots_are_the_product_of_the_degrees(pipe: int, model: int, data: int) -> None:
    slots = pipe * model * data
    hp = {"global_batch_size": data, "pipe_parallel_size": pipe, "model_parallel_size": model}
    derived = decide(hp, slots=slots, accelerator=MANY).topology
    assert derived.data_parallel_world_size == data
    assert derived.slots == slots
    assert derived == decide({**hp, "data_parallel_world_size": data}, slots=slots, accelerator=MANY).topology


@given(slots=SIZES, sizes=st.tuples(*[st.integers(1, 8)] * 3))
def test_degrees_that_do_not_divide_the_slots_are_refused_with_the_nearest_that_do(
    slots: int, sizes: tuple[int, ...]
) -> None:
    stated = dict(zip(DEGREES, sizes, strict=True))
    per_replica = sizes[0] * sizes[1] * sizes[2]
    problem = problem_of("topology", stated, {}, slots)
    assert (problem is None) == (slots % per_replica == 0)
    if problem is None:
        return
    assert (problem.key, problem.value) == ("slots_per_trial", slots)
    layout = " x ".join(
        f"{name} {size}" for name, size in [(n, f"{s} (hyperparameters)") for n, s in stated.items()]
    )
    assert f"{layout} = {per_replica}" in problem.message
    numbers = re.search(r"use (?:(\d+) or )?(\d+) slots", problem.fix)
    assert numbers
    assert {int(n) for n in numbers.groups() if n} == nearest([*range(per_replica, 1100, per_replica)], slots)
    for name, size in stated.items():
        other = per_replica // size
        advised = re.search(rf"{name} (\d+)", problem.fix)
        works = [n for n in range(1, slots + 1) if slots % (n * other) == 0]
        if advised:
            assert abs(int(advised.group(1)) - size) == min(abs(n - size) for n in works)
        else:
            assert not works or size == 1


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
def test_where_eight_ranks_stand(degrees: Numbers, within: bool, places: str) -> None:
    hp: dict[str, Any] = {f"{name}_parallel_size": size for name, size in degrees.items()}
    hp |= {"pipe_within_machine": True} if within else {}
    layout = decide({"global_batch_size": 8, **hp}, slots=8).topology
    found = [layout.coordinates(rank) for rank in range(8)]
    order = sorted([*degrees, "data"], key=["pipe", "data", "sequence", "model"].index)
    assert ["".join(f"{name[0]}{place[name]}" for name in order) for place in found] == places.split()


OF_POINT = ("global_batch_size", "data_parallel_world_size", *DEGREES, "pipe_chunks")
OF_JSON = (*BATCH,)[1:]


@given(
    st.dictionaries(st.sampled_from(OF_POINT), HUGE),
    st.dictionaries(st.sampled_from(OF_JSON), HUGE),
    HUGE,
)
def test_no_number_is_too_large_to_decide(hp: Numbers, ds: Numbers, slots: int) -> None:
    problems, _ = told(hp, ds, slots=slots, accelerator=MANY)
    assert all(problem.fix for problem in problems)


@pytest.mark.parametrize("stages", [200, 1_000, 1_000_000])
def test_the_bubble_of_a_long_pipeline_is_stated_at_once(stages: int) -> None:
    hp = {"global_batch_size": 1, "pipe_parallel_size": stages}
    (warning,) = decide(hp, slots=stages, accelerator=MANY).warnings
    assert warning.code == "pipeline-bubble"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_chunks_that_a_schedule_does_not_have_are_the_only_problem(schedule: str) -> None:
    hp = {"global_batch_size": 8, "pipe_parallel_size": 2, "pipe_chunks": 3, "pipe_schedule": schedule}
    (problem,), _ = told(hp, {"train_micro_batch_size_per_gpu": 8})
    assert (problem.key, problem.code) == ("hyperparameters.pipe_chunks", "pipe-chunks")
