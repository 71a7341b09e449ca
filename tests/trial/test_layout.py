"""Which ranks share a machine: DeepSpeed's topology has pipeline stages outermost, tensor-parallel ranks innermost.

What README says of several machines follows from these numbers. Ranks are counted machine by machine.
"""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

MACHINES = [{0, 1}, {2, 3}]  # of two slots each


def groups(topology: PipeDataParallelTopology, axis: str) -> list[set[int]]:
    return [set(ranks) for ranks in topology.get_axis_comm_lists(axis)]


def test_a_pipeline_spans_machines_and_the_replicas_of_a_stage_share_one() -> None:
    """So activations go between machines, and gradients are added up within each."""
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    assert groups(topology, "data") == MACHINES
    assert groups(topology, "pipe") == [{0, 2}, {1, 3}]
    for rank in range(4):
        assert topology.get_coord(rank).pipe == rank // 2
        assert topology.get_coord(rank).data == rank % 2


def test_without_a_pipeline_replicas_span_machines() -> None:
    assert groups(PipeDataParallelTopology(num_pp=1, num_dp=4), "data") == [{0, 1, 2, 3}]


@pytest.mark.parametrize(("pipe", "data"), [(1, 2), (2, 1)])
def test_ranks_that_share_a_layer_share_a_machine(pipe: int, data: int) -> None:
    assert groups(PipeModelDataParallelTopology(num_pp=pipe, num_dp=data, num_mp=2), "model") == MACHINES
