"""How long a step takes by arithmetic over computing, communication and the optimizer, by orders of magnitude.

Only the ratios between strategies matter: the first measurement sets the scale.
"""

from __future__ import annotations

from determined_ds.config.strategy import Strategy
from determined_ds.memory.model import ModelShape

# Of a rank: FLOP/s, bytes/s between ranks, bytes/s of its memory, seconds to start a micro-batch.
ASSUMED = {"cpu": (5e10, 2e9, 1e10, 4e-3), "cuda": (1e14, 1e11, 1e12, 3e-3)}
PCIE = 2e10  # bytes/s between a GPU and its host
HOST = ASSUMED["cpu"][2]  # bytes/s of its memory
# That AdamW reads and writes of a parameter: fp32 weight, gradient and two moments, and the copy.
STEP_BYTES = 28


def step_seconds(strategy: Strategy, shape: ModelShape, accelerator: str) -> float:
    """Seconds of a step, up to a factor that all strategies share.

    Compute is 6 operations a parameter and token (8 where activations are computed again; "Scaling Laws for Neural
    Language Models", arXiv 2001.08361); a pipeline takes that much longer as its schedule
    has ranks wait. Communication is ZeRO's (arXiv 1910.02054, section 7): twice the parameters a step, three times at
    stage 3; stages 2 and 3 reduce after every micro-batch.

    Args:
        strategy: How it is trained.
        shape: Of the model.
        accelerator: ``cpu`` or ``cuda``.
    """
    flops, link, memory, start = ASSUMED[accelerator]
    count, stages, zero, replicas = (
        strategy.accumulation,
        strategy.pipe_parallel_size,
        strategy.zero_stage,
        strategy.shards,
    )
    parameters, tokens = shape.num_parameters / stages, max(1, shape.sequence_length)
    operations = 8 if strategy.activation_checkpointing else 6
    work = operations * parameters * tokens * strategy.micro_batch_size * count
    seconds = (work / flops + start * count * strategy.pipe_chunks) / (1 - strategy.bubble)
    shards = replicas if zero else 1
    seconds += STEP_BYTES * parameters / shards / memory
    element = strategy.element_bytes
    if strategy.offload_optimizer:
        seconds += (STEP_BYTES / HOST + 2 * element / PCIE) * parameters / shards
    if strategy.offload_param:
        seconds += 3 * count * element * parameters / shards / PCIE
    if replicas > 1:
        # Passes of all parameters over a rank's link: a reduction that is a half of an all-reduce, and gathering.
        passes = {0: 2, 1: 2, 2: count + 1, 3: 3 * count}[zero]
        seconds += passes * parameters * element * (replicas - 1) / replicas / link
    if stages > 1:  # activations forward and their gradients backward
        width = tokens * max(1, shape.hidden_size) * element
        seconds += 2 * count * strategy.pipe_chunks * strategy.micro_batch_size * width / link
    return seconds
