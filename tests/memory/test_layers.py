"""Layers are cut as DeepSpeed cuts them, and computed again in groups as it does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from determined_ds.memory.layers import Bytes, LayerShape, bounds, part_bytes, rank_parameters

weights = st.lists(st.integers(0, 50), min_size=1, max_size=14)


def layers_of(sizes: list[int]) -> tuple[LayerShape, ...]:
    return tuple(LayerShape(name=f"L{size % 3}", num_trainable_parameters=size) for size in sizes)


@given(weights, st.integers(1, 6))
def test_by_parameters_uniform_and_by_type(sizes: list[int], parts: int) -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    layers = layers_of(sizes)
    assert list(bounds(layers, "parameters", parts)) == partition_balanced(sizes, parts)
    assert list(bounds(layers, "uniform", parts)) == partition_uniform(len(sizes), parts)
    of_type = [int(size % 3 == 1) for size in sizes]
    assert list(bounds(layers, "type:l1", parts)) == partition_balanced(of_type, parts)


def test_tied_layers_are_on_a_rank_once() -> None:
    tied, own = (LayerShape(name="", num_parameters=size, tied_key=key) for size, key in ((7, "t"), (5, "")))
    assert rank_parameters([tied, own, own, tied]) == (17, 0)


def test_layers_that_are_computed_again_keep_the_outputs_of_each_group() -> None:
    def sized(size: int) -> Bytes:
        return Bytes(per_sample=size)

    layer = LayerShape(name="", inputs=sized(1), outputs=sized(1), kept=sized(10), backward=sized(14))
    part = [layer] * 4
    assert part_bytes(part, 2).kept == 2 * (1 + 40)
    assert part_bytes(part, 2, recomputed=2).kept == 2 * (1 + 2)
    # The last group is there again, with the input of the part, the first group's outputs and its own.
    assert part_bytes(part, 2, recomputed=2).backward == 2 * (1 + 1 + 10 + 14 + 1)
