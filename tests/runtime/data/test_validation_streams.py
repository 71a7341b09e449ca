"""Validation on a stream of unknown length: every sample counts once, and all replicas make as many calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import DataError
from determined_ds.runtime.data.shares import CallPlan, UncountedShare, ValidationBatches
from determined_ds.trial.stream_loader import StreamLoader
from tests.runtime.data.test_samples import SEED
from tests.runtime.data.test_streams import Count, Shuffled


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_every_validation_sample_counts_once_and_all_replicas_make_as_many_calls(
    size: int, micro: int, replicas: int, at_most: int
) -> None:
    loader = StreamLoader(Count(size), micro)
    readings = [
        UncountedShare(loader, replica=replica, replicas=replicas, seed=SEED, length_of=len).open()
        for replica in range(replicas)
    ]
    agreed: list[CallPlan] = []

    def plans(number: int) -> Iterator[CallPlan]:
        """As a collective: the first replica that asks has all of them read ahead."""
        for index in itertools.count():
            if index == len(agreed):
                agreed.append(CallPlan([each.ahead(3) for each in readings], at_most=at_most))
            if not agreed[index].num_batches:
                return
            yield agreed[index]

    batches = [ValidationBatches(reading, plans(i), len) for i, reading in enumerate(readings)]
    seen: list[int] = []
    while any(counts := [each.next_call() for each in batches]):
        assert len(set(counts)) == 1, "a forward pass may be collective"
        for each in batches:
            each.start_call()
            taken = [next(each) for _ in range(counts[0])]
            assert len({len(batch) for batch in taken}) == 1, "an engine averages over them"
            assert len(set(each.weights)) == 1
            seen += [
                number
                for batch, weight in zip(taken, each.weights, strict=True)
                if weight
                for number in batch.tolist()
            ]
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_validation_can_be_repeated(workers: int) -> None:
    share = UncountedShare(
        StreamLoader(Shuffled(11), 2, num_workers=workers), replica=1, replicas=2, seed=SEED, length_of=len
    )
    first, second = ([batch.tolist() for batch in share] for _ in range(2))
    assert first == second
    assert [len(batch) for batch in first] == [2, 2, 1]


def test_an_empty_validation_stream_is_refused() -> None:
    share = UncountedShare(StreamLoader(Count(0), 2), replica=0, replicas=2, seed=SEED, length_of=len)
    with pytest.raises(DataError, match="yields no samples"):
        share.open().ahead(1)
