"""An engine in a checkpoint, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from determined_ds.protocol.tensor_index import read_index
from determined_ds.runtime.checkpoints.tensors_by_name import IndexedEngine, StoredEngine
from determined_ds.runtime.checkpoints.written_by_deepspeed import DeepSpeedFiles


def stored_engine(folder: Path, order: Sequence[Sequence[str]] | None = None) -> StoredEngine:
    """An engine in a checkpoint, by name and slice, whoever wrote it.

    Args:
        folder: ``model<I>`` of the checkpoint.
        order: The names of parameters in each group of the optimizer; needed for the optimizer's states of an engine
            that DeepSpeed wrote without ZeRO.

    Raises:
        CheckpointError: it is damaged, or only the ranks that wrote it can read it.
    """
    index = read_index(folder)
    return DeepSpeedFiles(folder, order) if index is None else IndexedEngine(folder, index)
