"""Who is with whom among 16 ranks: stages, replicas, copies of a tied weight, secondary partitions.

By torch's fake backend, which makes groups and sends nothing: one process is each of the ranks in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import Ranks

SIZE, STAGES, REPLICAS, ON_A_MACHINE = 16, 4, 4, 8


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """This process is one of 16 ranks, whose messages go nowhere."""
    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        yield
    finally:
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def groups_of_pipeline() -> list[dict[str, Any]]:
    """Of each rank: its part of GPT-2 in four stages, on four replicas, as DeepSpeed and Determined know it."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from determined.pytorch.deepspeed import make_deepspeed_mpu

    from model_defs.gpt2.model import gpt2_config, pipeline_layer_plan

    config = gpt2_config("tiny", vocab_size=16, sequence_length=8, dropout=0.0)
    specs = [
        TiedLayerSpec(
            p.tied_key, p.layer, *p.args, forward_fn=p.forward_fn, tied_weight_attr=p.tied_weight_attr
        )
        if p.tied_key
        else LayerSpec(p.layer, *p.args)
        for p in pipeline_layer_plan(config)
    ]
    found = []
    for rank in range(SIZE):
        with as_rank(rank):
            module = PipelineModule(specs, num_stages=STAGES, partition_method="type:Block")
            grid = module._grid
            unit = make_deepspeed_mpu(grid)
            found.append(
                {
                    "stage": grid.get_stage_id(),
                    "replicas": grid.dp_group,
                    "pipeline": grid.pp_group,
                    "tied": [comm["ranks"] for comm in module.tied_comms.values()],
                    "replica": unit.data_parallel_rank,
                    "loads": unit.should_build_data_loader,
                    "reports": unit.should_report_metrics,
                }
            )
    return found


def test_stages_replicas_and_copies_of_a_tied_weight(one_rank: Ranks) -> None:
    """Replicas are side by side: on machines of eight, gradients stay within and activations go between."""
    (found,) = one_rank.run(groups_of_pipeline)
    for rank, of_rank in enumerate(found):
        stage, replica = divmod(rank, REPLICAS)
        pipeline = [replica + REPLICAS * each for each in range(STAGES)]
        is_end = stage in (0, STAGES - 1)
        assert of_rank == {
            "stage": stage,
            "replicas": [REPLICAS * stage + each for each in range(REPLICAS)],
            "pipeline": pipeline,
            "tied": [[pipeline[0], pipeline[-1]]] if is_end else [],
            "replica": replica,
            "loads": is_end,
            "reports": True,  # the engine tells all stages the loss
        }, rank
        assert len({other // ON_A_MACHINE for other in of_rank["replicas"]}) == 1
        assert len({other // ON_A_MACHINE for other in of_rank["pipeline"]}) == 2


def groups_of_secondary_partitions(size: int) -> list[list[int]]:
    """Of each rank: those that hold a second copy of the parameters with it."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    found = []
    for rank in range(SIZE):
        with as_rank(rank):
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
            groups._create_zero_param_parallel_group(size)
            found.append(dist.get_process_group_ranks(groups._get_zero_param_intra_parallel_group()))
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return found


@pytest.mark.parametrize("size", [2, ON_A_MACHINE])
def test_secondary_partitions_are_within_a_machine(size: int, one_rank: Ranks) -> None:
    (found,) = one_rank.run(groups_of_secondary_partitions, size)
    for rank, group in enumerate(found):
        first = rank // size * size
        assert group == list(range(first, first + size))
        assert len({other // ON_A_MACHINE for other in group}) == 1
