"""What ranks of a pipeline write: a weight that they share once, with a word where their values differ; in order."""

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


def test_tensors_stand_in_the_order_of_the_layers_whichever_ranks_hold_them() -> None:
    ranks, entries = [], []
    for rank, layers in enumerate(([0, 3, 10], [1, 2])):
        names = [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]
        kinds = dict.fromkeys(names, ((1,), TRAINED))
        ranks.append(Described(kinds=kinds, aliases={}, common={}, scalars={}, optimizer="", shared={}))
        for number, name in enumerate(names):
            piece = Piece(file=f"rank{rank}.safetensors", offset=8 + 4 * number, start=0, count=1)
            entries.append(Entry(name=name, state=WEIGHT, dtype="F32", piece=piece))
    expected = [f"{layer}.{name}" for layer in (0, 1, 2, 3, 10) for name in ("weight", "bias")]
    assert list(index_of(ranks, entries).tensors) == expected
