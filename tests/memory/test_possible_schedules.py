"""What each rank of a pipeline holds under every schedule: the memory model against real engines, within 10 %."""

from __future__ import annotations

import pytest

from determined_ds.config.strategy import Strategy
from determined_ds.memory import ModelShape
from determined_ds.memory.activations import activations_of_stages
from determined_ds.memory.states import stage_parameters
from determined_ds.pipe.orders import DUALPIPEV, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from tests.memory.piped import layer_shapes, peak_bytes
from tests.ranks import Ranks

SAMPLES = 4
SCHEDULES = ((GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2), (ZB_H1, 1), (DUALPIPEV, 2))


def check(ranks: Ranks, one_rank: Ranks, schedule: str, chunks: int) -> None:
    strategy = Strategy(
        precision="fp32",
        pipe_parallel_size=ranks.size,
        pipe_schedule=schedule,
        pipe_chunks=chunks,
        micro_batch_size=SAMPLES,
        accumulation=3 * ranks.size,
    )
    (layers,) = one_rank.run(layer_shapes)
    shape = ModelShape(
        num_parameters=sum(each.num_parameters for each in layers),
        layers=layers,
        layer_element_bytes=4,
        partition_method="uniform",
    )
    found = ranks.run(peak_bytes, strategy.pipeline, SAMPLES)
    assert [own for _, own in found] == [own for own, _ in stage_parameters(shape, strategy)]
    held = [most - 4 * own for most, own in found]  # gradients of parameters are model states
    assert held == pytest.approx(activations_of_stages(shape, strategy), rel=0.1)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_two_ranks_hold_what_the_model_says(
    two_ranks: Ranks, one_rank: Ranks, schedule: str, chunks: int
) -> None:
    check(two_ranks, one_rank, schedule, chunks)


@pytest.mark.long("two ranks hold what the model says")
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_so_do_four(four_ranks: Ranks, one_rank: Ranks, schedule: str, chunks: int) -> None:
    check(four_ranks, one_rank, schedule, chunks)
