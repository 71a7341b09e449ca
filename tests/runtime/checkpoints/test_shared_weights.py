"""A weight that pipeline stages share is written once; where they hold other values of it, that is said."""

from __future__ import annotations

import pytest

from determined_ds.protocol.tensor_index import TRAINED, WEIGHT, Piece
from determined_ds.runtime.checkpoints.shards import Described, Entry, index_of


def stage(norm: float) -> Described:
    kinds = {"0.weight": ((4,), TRAINED)}
    return Described(kinds=kinds, aliases={}, common={}, scalars={}, optimizer="", shared={"0.weight": norm})


@pytest.mark.parametrize(("norms", "is_said"), [((1.5, 1.5), False), ((1.5, 1.5000000000000002), True)])
def test_other_values_on_another_stage_are_said(
    norms: tuple[float, float], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    piece = Piece(file="rank0.safetensors", offset=8, start=0, count=4)
    entry = Entry(name="0.weight", state=WEIGHT, dtype="F32", piece=piece)
    index_of([stage(norm) for norm in norms], [entry])
    assert ("pipeline stages share 0.weight" in caplog.text) is is_said
