"""The proof of ``--test``: a checkpoint restores a scrambled model to the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from determined_ds.checkpoints.writer import scramble
from determined_ds.errors import CheckpointError
from determined_ds.train.loop.custom_reducers import is_same

# Kernels of a GPU may add the same numbers in a different order each time. In bf16 that is the last of three digits.
GPU_TOLERANCE = 0.01


def prove_checkpoint(context: Any, validate: Callable[[], Any], load: Callable[[], Any]) -> str:
    """Scramble the weights, load the checkpoint back, and validate to the same number; a collective.

    Args:
        context: The trial's.
        validate: Returns the metrics of a validation.
        load: Loads the checkpoint.

    Returns:
        How equal the numbers were, in words.

    Raises:
        CheckpointError: they differ.
    """
    before = validate()
    scramble(context.models)
    load()
    after = validate()
    on_gpu = context.device.type == "cuda"
    if not is_same(before, after, tolerance=GPU_TOLERANCE if on_gpu else 0.0):
        raise CheckpointError(f"validated {before} before the checkpoint and {after} after loading it back")
    return f"the same number within {GPU_TOLERANCE:.1%}" if on_gpu else "the same number"
