"""What of a checkpoint can be read under another strategy or by other ranks than wrote it. Loads no torch.

``load_data.json`` holds under ``written_by`` what the ranks know of themselves, see :func:`written_by`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.index import INDEX_NAME
from determined_ds.rundir.handed_on import count

LOAD_DATA, WRITTEN_BY = "load_data.json", "written_by"
ENGINE, HF_FOLDER = "model", "checkpoint-"


def written_by(path: Path) -> Mapping[str, Any]:
    """Who wrote a checkpoint; empty where it does not say.

    Returns:
        ``ranks``, ``replicas``, ``micro_batch_size``, ``engine`` (``deepspeed`` or ``ddp``); ``own_layout``: why only
        the same layout can read it, or None; ``data_apart``: data that gives each replica samples of its own and has
        a position in them, or None; ``schedule_by_length``: the class of a schedule that may depend on the length of
        training, and whether its settings must stay what they were.
    """
    try:
        found = json.loads((path / LOAD_DATA).read_bytes()).get(WRITTEN_BY)
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def elastic_refusal(path: Path) -> str | None:
    """Why a checkpoint can only be read by the strategy and the number of ranks that wrote it; None where any can.

    Args:
        path: Its folder.
    """
    if any(path.glob(f"{HF_FOLDER}*")):
        return "transformers' Trainer wrote it, in DeepSpeed's own layout"
    if reason := written_by(path).get("own_layout"):
        return str(reason)
    engines = [each for each in path.glob(f"{ENGINE}[0-9]*") if each.is_dir()]
    if not engines:
        return "it holds no engine"
    indexed = all((each / INDEX_NAME).is_file() for each in engines)
    return None if indexed else "DeepSpeed wrote it in its own layout"


def data_refusal(path: Path, *, replicas: int, micro_batch_size: int) -> str | None:
    """Why the position in the training data cannot be taken over by so many replicas; None where it can.

    Args:
        path: Of the checkpoint.
        replicas: That will train.
        micro_batch_size: Of the training to come.
    """
    before, now = written_by(path), (replicas, micro_batch_size)
    then = (before.get("replicas", replicas), before.get("micro_batch_size", micro_batch_size))
    return apart_refusal(before.get("data_apart"), then=then, now=now)


def apart_refusal(data: Sequence[Any] | None, *, then: tuple[int, int], now: tuple[int, int]) -> str | None:
    """Why data that has a position on each replica cannot continue from it; None where it can.

    Args:
        data: Its name, and whether the position depends on the size of micro-batches too; None for data whose
            position is the same on all replicas.
        then: Replicas and samples in a micro-batch, when the position was written.
        now: The same now.
    """
    if data is None or then == now or (then[0] == now[0] and not data[1]):
        return None
    words = [f"{count(replicas, 'replica')} with micro-batches of {size}" for replicas, size in (then, now)]
    return f"{data[0]} gives each replica its own samples: its position is that of {words[0]}, and now it is {words[1]}"


DATA_FIX = (
    "resume with the replicas and the micro-batch that wrote it, or start anew with data that is one stream for all "
    "replicas: self.training_loader(dataset), without sharded=True"
)
