"""Which ranks share a machine: DeepSpeed's topology has pipeline stages outermost, tensor-parallel ranks innermost.

What docs/machines.md says of several machines follows from these numbers. Ranks are counted machine by machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

from determined_ds.config.topology import Topology
from determined_ds.trial.ordered_module import process_topology
from tests.ranks import Ranks
from tests.runtime.checkpoints.strategies import ZERO, run

MACHINES = [{0, 1}, {2, 3}]  # of two slots each


def groups(topology: ProcessTopology, axis: str) -> list[set[int]]:
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


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("pipe", "model", "data"), [(2, 1, 4), (4, 1, 2), (2, 2, 2), (1, 1, 8)])
def test_deepspeed_is_given_the_layout_that_is_rendered(
    pipe: int, model: int, data: int, within: bool
) -> None:
    layout = Topology(
        pipe_parallel_size=pipe,
        model_parallel_size=model,
        data_parallel_world_size=data,
        pipe_within_machine=within,
    )
    given = process_topology(layout)
    for rank in range(8):
        place = given.get_coord(rank)._asdict()
        assert place == {name: layout.coordinates(rank)[name] for name in place}
    if not within and model == 1:  # DeepSpeed's own
        assert given.mapping == PipeDataParallelTopology(num_pp=pipe, num_dp=data).mapping


def test_a_pipeline_within_a_machine() -> None:
    """So activations stay within each, and gradients are added up between machines."""
    layout = Topology(
        pipe_parallel_size=2, model_parallel_size=1, data_parallel_world_size=2, pipe_within_machine=True
    )
    given = process_topology(layout)
    assert groups(given, "pipe") == MACHINES
    assert groups(given, "data") == [{0, 2}, {1, 3}]


def test_losses_do_not_depend_on_it(four_ranks: Ranks, tmp_path: Path) -> None:
    """Two stages of two replicas, under ZeRO 1 and with a tied weight."""
    losses = [
        four_ranks.run(run, ZERO[name], str(tmp_path / name), steps=4)
        for name in ("pipe2_zero1", "pipe2_within_machine")
    ]
    assert losses[0] == losses[1]
