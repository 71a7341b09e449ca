"""Whether a model will fit, by the estimate: a rank that runs out of memory would leave the others waiting."""

from __future__ import annotations

import torch

from determined_ds.config.strategy import Strategy
from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_per_rank
from determined_ds.memory.units import format_bytes
from determined_ds.runtime.benching.timing import Group
from determined_ds.runtime.checkpoints.aside import available_bytes

SHARE = 0.8  # of what is free


def too_large(group: Group, shape: ModelShape, strategy: Strategy) -> str:
    """Why a model will not be trained here; "" where it fits on all ranks. An exchange.

    Args:
        group: Of the ranks.
        shape: Of the model.
        strategy: Its micro-batch counts.
    """
    memory, ranks = memory_per_rank(shape, strategy), int(group.distributed.local_size)
    # The weights are made whole on each rank before they are divided.
    device = memory.total_bytes + strategy.element_bytes * shape.num_parameters
    host = memory.host_bytes
    free_host = available_bytes() / ranks
    if group.device.type == "cpu":
        short = [("a rank", device + host, free_host)]
    else:
        short = [
            ("a GPU", device, torch.cuda.mem_get_info(group.device)[0]),
            ("a rank's host", host, free_host),
        ]
    said = [
        f"about {format_bytes(int(need))} on {what}, where {format_bytes(int(free))} are free"
        for what, need, free in short
        if need > SHARE * free
    ]
    answers = group.distributed.allgather(said[0] if said else "")
    return next((each for each in answers if each), "")
