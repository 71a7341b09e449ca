"""An engine in a checkpoint, of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from determined_ds.protocol.tensor_index import read_index
from determined_ds.runtime.checkpoints.foreign_files import DeepSpeedFiles
from determined_ds.runtime.checkpoints.tensors_by_name import IndexedEngine, StoredEngine


def stored_engine(folder: Path, order: Sequence[Sequence[str]] | None = None) -> StoredEngine:
    """An engine in a checkpoint, by name and slice, of any layout.

    Args:
        folder: ``model<I>`` of the checkpoint.
        order: The names of parameters in each group of the optimizer; needed for the optimizer's states of an engine
            that DeepSpeed wrote without ZeRO.

    Raises:
        CheckpointError: it is damaged, or only the ranks that wrote it can read it.
    """
    index = read_index(folder)
    return DeepSpeedFiles(folder, order) if index is None else IndexedEngine(folder, index)
