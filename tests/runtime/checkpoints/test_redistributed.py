"""The parts of ranks, read by other ranks in any number: nothing is lost, and nothing doubled."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined.pytorch import Reducer
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import CheckpointError
from determined_ds.runtime.checkpoints.redistributed import (
    RankPlace,
    counterpart,
    load_into,
    part_for,
    union_of,
)
from determined_ds.runtime.data.samples import APART
from determined_ds.runtime.data.seeds import rng_state, seed_everything, set_rng_state
from determined_ds.runtime.loop.custom_reducers import Reducers, reduced_by_slot
from determined_ds.runtime.loop.metric_sums import MetricSums

CPU = torch.device("cpu")
SEED = 7
SIZES = st.lists(st.integers(1, 6), min_size=2, max_size=6)


def places(replicas: int, members: int = 1, *, calls: int = 4, micro_batch_size: int = 2) -> list[RankPlace]:
    """As DeepSpeed numbers the ranks of a pipeline: those of a stage one after the other."""
    return [
        RankPlace(
            rank=member * replicas + replica,
            ranks=replicas * members,
            replica=replica,
            replicas=replicas,
            member=member,
            members=members,
            calls=calls,
            micro_batch_size=micro_batch_size,
        )
        for member in range(members)
        for replica in range(replicas)
    ]


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (((0, 0, 1, 1),), ((0, 0, 1, 1),), True),
        (((0, 0, 1, 1),), ((0, 1, 1, 0),), False),
        (((0, 1, 1, 0),), ((0, 1, 0, 1),), False),
        ((), ((0, 0, 1, 1),), True),
        ((), ((0, 1, 1, 0),), False),
        ((), ((),), True),
    ],
    ids=["as it was", "folded", "in turns", "unknown, one part", "unknown, two parts", "no pipeline"],
)
def test_a_rank_takes_its_own_part_where_it_holds_the_same_layers(then: Any, now: Any, same: bool) -> None:
    """A checkpoint that does not say who held which was written when each held one part."""
    place = places(1, 2)[1]
    assert replace(place, owners=now).holds_same(replace(place, owners=then)) is same


def part(place: RankPlace, *, callbacks: Any = None, generators: Any = None, **parts: Any) -> dict[str, Any]:
    return {
        "place": vars(place),
        "callbacks": callbacks or {},
        "parts": parts,
        "rng_state": generators or {},
        "built": None,
    }


def read_by(here: RankPlace, old: Sequence[Any], owners: Any = None, *, batch: int = 5) -> dict[str, Any]:
    return part_for(here, old, owners or {}, seed=SEED, batch=batch)


# ------------------------------------------------------------------------------------------- sums


KINDS = {"most": Reducer.MAX, "least": Reducer.MIN, "total": Reducer.SUM}


@given(SIZES, st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_sums_over_all_ranks_stay_what_they_are(sizes: list[int], values: list[float]) -> None:
    ranks = [MetricSums(CPU, KINDS) for _ in range(sizes[0])]
    for index, value in enumerate(values):
        names = ("loss", *KINDS)
        ranks[index % sizes[0]].add(dict.fromkeys(names, value), weight=1 + index % 3)
    before = over_all(ranks)
    for size in sizes[1:]:
        old = [
            part(place, metrics=own.state_dict())
            for place, own in zip(places(len(ranks)), ranks, strict=True)
        ]
        ranks = [MetricSums(CPU, KINDS) for _ in range(size)]
        for place, own in zip(places(size), ranks, strict=True):
            load_into(own, read_by(place, old)["parts"]["metrics"])
    assert over_all(ranks) == pytest.approx(before)


def over_all(ranks: list[MetricSums]) -> dict[str, float]:
    """What :meth:`MetricSums.reduce` makes of them."""
    states = [own.state_dict() for own in ranks]
    have = [state for state in states if state["values"]]
    weight = sum(state["weights"]["loss"] for state in have)
    found = {name: [float(state["values"][name]) for state in have] for name in ("loss", *KINDS)}
    return {
        "loss": sum(found["loss"]) / weight,
        "total": sum(found["total"]),
        "most": max(found["most"]),
        "least": min(found["least"]),
        "weight": weight,
    }


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4), st.integers(1, 4))
def test_a_step_weighs_the_same_in_the_mean_however_its_batch_is_cut(
    then: int, now: int, steps_then: int, steps_now: int
) -> None:
    """The loss of a step is its number; the mean is over steps, not over the calls that it took."""
    old_sums = [MetricSums(CPU) for _ in range(2)]
    for step, own in itertools.product(range(steps_then), old_sums):
        for _ in range(then):
            own.add({"loss": float(step)})
    old = [
        part(place, metrics=own.state_dict())
        for place, own in zip(places(2, calls=2 * then), old_sums, strict=True)
    ]
    sums = MetricSums(CPU)
    load_into(sums, read_by(places(1, calls=now)[0], old)["parts"]["metrics"])
    for step in range(steps_then, steps_then + steps_now):
        for _ in range(now):
            sums.add({"loss": float(step)})
    steps = steps_then + steps_now
    assert sums.reduce()["loss"] == pytest.approx(sum(range(steps)) / steps)


# ------------------------------------------------------------------------------------------- custom reducers


class Listing:
    """A custom reducer, as it comes out of ``wrap_reducer``."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def per_slot_reduce(self) -> list[int]:
        return self.values


def slots(size: int) -> list[Any]:
    """The contexts of some ranks, each with a reducer."""
    return [
        SimpleNamespace(_wrapped_reducers=[SimpleNamespace(reducer=Listing())], carried_slots=[])
        for _ in range(size)
    ]


def gathered(contexts: list[Any]) -> Counter[int]:
    rows = []
    for context in contexts:
        wrapped = context._wrapped_reducers
        rows += [wrapped[0].reducer.per_slot_reduce()]
        rows += [reduced_by_slot(wrapped, state, wrapped)[0] for state in context.carried_slots]
    return Counter(value for row in rows for value in row)


@given(SIZES, st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_custom_reducers_reduce_what_any_rank_was_given(sizes: list[int], counts: list[int]) -> None:
    contexts, numbers, given_so_far = slots(sizes[0]), itertools.count(), 0
    for size, updates in zip(sizes, counts, strict=False):
        old = [
            part(place, reducers=Reducers(context).state_dict())
            for place, context in zip(places(len(contexts)), contexts, strict=True)
        ]
        contexts = slots(size)
        for place, context in zip(places(size), contexts, strict=True):
            state = read_by(place, old)["parts"].get("reducers")
            if state is not None:
                Reducers(context).load_state_dict(state)
            for _ in range(updates):
                context._wrapped_reducers[0].reducer.values.append(next(numbers))
        given_so_far += updates * size
        assert gathered(contexts) == Counter(range(given_so_far))


def test_the_reducers_of_an_older_checkpoint_are_those_of_one_slot() -> None:
    [context] = slots(1)
    Reducers(context).load_state_dict([{"values": [3]}])
    assert gathered([context]) == Counter([3])


# ------------------------------------------------------------------------------------------- generators


def drawn_by(state: Any) -> float:
    set_rng_state(state, CPU)
    return float(torch.rand(()))


def generators_of(seed: int) -> Any:
    seed_everything(seed)
    return rng_state(CPU)


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_replica_keeps_its_generators_and_a_further_one_has_its_own(then: int, now: int) -> None:
    old = [part(place, generators=generators_of(place.replica)) for place in places(then)]
    drawn = [drawn_by(read_by(place, old)["rng_state"]) for place in places(now)]
    assert len(set(drawn)) == now
    assert drawn[:then] == [drawn_by(generators_of(replica)) for replica in range(min(then, now))]


def test_a_further_replica_draws_other_numbers_at_each_batch() -> None:
    old = [part(place, generators=generators_of(0)) for place in places(1)]
    second = places(2)[1]
    drawn = [drawn_by(read_by(second, old, batch=batch)["rng_state"]) for batch in (5, 6, 5)]
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ((2, 1), (1, 2), [0, 0]),  # two replicas -> two stages of one: both are of replica 0
        ((1, 2), (2, 1), [0, None]),
        ((2, 2), (2, 2), [0, 1, 2, 3]),
        ((1, 4), (2, 2), [0, None, 0, None]),  # ranks of a stage are numbered one after the other
        ((2, 2), (1, 2), [0, 2]),
    ],
)
def test_the_replica_counts_and_not_the_rank(
    then: tuple[int, int], now: tuple[int, int], expected: list[int | None]
) -> None:
    old = places(*then)
    assert [counterpart(old, here) for here in places(*now)] == expected


# ------------------------------------------------------------------------------------------- the position


def test_the_position_in_a_stream_is_that_of_any_rank_that_reads_it() -> None:
    """A pipeline's middle stages have none."""
    old = [part(place, data={"samples": 40} if place.member != 1 else {}) for place in places(1, 3)]
    for here in places(4):
        assert read_by(here, old)["parts"]["data"] == {"samples": 40}


@pytest.mark.parametrize(
    ("apart", "now", "is_refused"),
    [
        (("Shards", False), {"replicas": 1}, True),
        (("Shards", False), {"replicas": 2, "micro_batch_size": 4}, False),
        (("StatefulDataLoader", True), {"replicas": 2, "micro_batch_size": 4}, True),
        (("StatefulDataLoader", True), {"replicas": 2, "members": 2}, False),
    ],
)
def test_a_position_on_each_replica_is_refused_by_name(
    apart: tuple[str, bool], now: dict[str, int], is_refused: bool
) -> None:
    old = [part(place, data={"samples": place.rank, APART: apart}) for place in places(2)]
    for here in places(**now):
        if is_refused:
            with pytest.raises(
                CheckpointError, match=rf"{apart[0]} gives each replica(?s:.*)fix: resume with"
            ):
                read_by(here, old)
        else:
            assert read_by(here, old)["parts"]["data"]["samples"] == here.replica


# ------------------------------------------------------------------------------------------- all else


def test_the_same_state_of_all_ranks_goes_on_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    state = {"best": {"best": 0.5, "of": torch.ones(2)}}
    old = [part(place, callbacks=state) for place in places(3)]
    for here in places(2):
        assert read_by(here, old)["callbacks"]["best"]["best"] == 0.5
    assert not caplog.records


def test_states_that_differ_are_joined_by_load_whole_or_named(caplog: pytest.LogCaptureFixture) -> None:
    old = [part(place, callbacks={"seen": {"count": place.rank}}) for place in places(3)]
    owner = SimpleNamespace(load_whole=lambda states: None)
    whole = read_by(places(2)[1], old, {"seen": owner})["callbacks"]["seen"]
    assert [state["count"] for state in whole.states] == [0, 1, 2]
    with caplog.at_level(logging.WARNING):
        assert read_by(places(2)[1], old)["callbacks"]["seen"] == {"count": 1}
    assert "callback 'seen' differed" in caplog.text
    assert "load_whole" in caplog.text


def test_stages_built_what_the_model_has_in_all() -> None:
    def record(**parameters: str) -> Any:
        return {"parameters": parameters, "groups": [{"lr": 0.1}]}

    assert union_of([[record(a="(2,)")], [record(b="(3,)")]]) == [record(a="(2,)", b="(3,)")]
