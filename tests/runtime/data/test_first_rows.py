"""The first samples of each replica say whether a stream is the same on all of them, as it has to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.errors import DataError
from determined_ds.runtime.data.streams import FirstRow, check_first_rows, digest
from tests.runtime.data.test_samples import split
from tests.runtime.data.test_streams import Count, Shuffled, opened, range_of


def first_rows(make: Callable[[int], Any], **options: Any) -> list[FirstRow | None]:
    batch = split(2, 1, 2)
    return [opened(make(replica), batch, replica=replica, **options).first for replica in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_not_the_same_on_all_replicas_is_refused(workers: int) -> None:
    """One that splits itself by rank, or is shuffled by a generator that nobody seeded."""
    check_first_rows(first_rows(lambda replica: Shuffled(20), num_workers=workers), print)
    with pytest.raises(DataError, match="other samples on one replica than on another") as raised:
        check_first_rows(first_rows(lambda replica: range_of(replica, 20), num_workers=workers), print)
    assert "sharded=True" in raised.value.problems[0].fix


def test_a_sharded_stream_that_is_the_same_on_all_replicas_is_warned_of() -> None:
    said: list[str] = []
    check_first_rows(first_rows(lambda replica: range_of(replica, 20), sharded=True), said.append)
    assert said == []
    check_first_rows(first_rows(lambda replica: Count(20), sharded=True), said.append)
    assert "first samples are the same on every replica" in said[0]


def test_a_digest_tells_samples_apart_and_not_processes() -> None:
    image = np.zeros((2, 3), dtype=np.uint8)
    samples = [{"image": image, "label": 1, "text": "a"}, (torch.zeros(2, dtype=torch.bfloat16), None, b"x")]
    assert digest(samples) == digest([{**samples[0], "image": image.copy()}, samples[1]])
    for other in (image + 1, image.T, image.astype(np.int16)):
        assert digest(samples) != digest([{**samples[0], "image": other}, samples[1]])
    assert digest([object()]) == digest([object()]), "what has no value that can be compared"
