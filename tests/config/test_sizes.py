"""slots = pipe x model x sequence x data, and batch = micro-batch x accumulation x data: exactly, or refused."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from determined_ds import Accelerator, Problem
from tests.config.deciding import told
from tests.package import decide

SIZES, FACTORS, HUGE = st.integers(1, 48), st.integers(1, 12), st.integers(1, 2**31 - 1)
MANY = Accelerator(name="cuda", num_devices=10**18, bf16=True, fp16=True)
TOTAL, MICRO, STEPS = "global_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
DEGREES = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size")
Numbers = dict[str, int]


def problem_of(code: str, numbers: Numbers, slots: int) -> Problem | None:
    """What is wrong with sizes of a kind, if anything; each problem of any kind has a fix."""
    ds = {name: number for name, number in numbers.items() if name in (MICRO, STEPS)}
    hp = {name: number for name, number in numbers.items() if name not in ds}
    problems, _ = told(hp, ds, slots=slots, accelerator=MANY)
    assert all(problem.fix for problem in problems)
    found = [each for each in problems if each.code.startswith(code)]
    assert len(found) <= 1
    return found[0] if found else None


@given(SIZES, SIZES, SIZES, st.sets(st.sampled_from([TOTAL, MICRO, STEPS]), min_size=1))
def test_numbers_that_determine_the_rest_are_completed(
    micro: int, steps: int, replicas: int, names: set[str]
) -> None:
    """An accumulation that nobody states is 1."""
    if names == {STEPS}:
        problem = problem_of("batch", {STEPS: steps}, replicas)
        assert problem
        assert problem.code == "batch-missing"
        return
    steps = 1 if len(names) == 1 else steps
    whole = {TOTAL: micro * steps * replicas, MICRO: micro, STEPS: steps}
    ds = {name: whole[name] for name in names - {TOTAL}}
    hp = {name: whole[name] for name in names & {TOTAL}}
    batch = decide(hp, ds, slots=replicas, accelerator=MANY).batch
    found = (batch.global_batch_size, batch.micro_batch_size, batch.accumulation, batch.replicas)
    assert found == (*whole.values(), replicas)


@given(st.fixed_dictionaries({TOTAL: SIZES}, optional={MICRO: FACTORS, STEPS: FACTORS}), FACTORS)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(stated: Numbers, replicas: int) -> None:
    problem, total = problem_of("batch", stated, replicas), stated[TOTAL]
    product = replicas * math.prod(stated.values()) // total
    assert (problem is None) == (total == product if len(stated) == 3 else total % product == 0)
    if problem is not None:
        assert (problem.key, problem.value) == (f"hyperparameters.{TOTAL}", total)
        above = product if len(stated) == 3 else total - total % product + product
        assert str(above) in problem.fix.split()


@given(slots=SIZES, sizes=st.tuples(*[st.integers(1, 8)] * 3))
def test_degrees_divide_the_slots_or_are_refused(slots: int, sizes: tuple[int, ...]) -> None:
    stated, per_replica = dict(zip(DEGREES, sizes, strict=True)), math.prod(sizes)
    problem = problem_of("topology", stated, slots)
    assert (problem is None) == (slots % per_replica == 0)
    if problem is None:
        for replicas in (slots // per_replica, slots // per_replica + 1):
            wrong = problem_of("topology", {**stated, "data_parallel_world_size": replicas}, slots)
            assert (wrong is None) == (replicas * per_replica == slots)
    else:
        assert (problem.key, problem.value) == ("slots_per_trial", slots)


@given(st.dictionaries(st.sampled_from((TOTAL, MICRO, STEPS, *DEGREES, "pipe_chunks")), HUGE), HUGE)
def test_no_number_is_too_large_to_decide(numbers: Numbers, slots: int) -> None:
    problem_of("topology", numbers, slots)
