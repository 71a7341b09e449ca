"""The engine of a checkpoint that is exported: verified, and read by name and slice."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.reader import StoredEngine, stored_weights
from determined_ds.errors import CheckpointError
from determined_ds.protocol.checkpoint_files import damage_in_share, is_sealed, unverified
from determined_ds.protocol.elastic import LOAD_DATA

logger = logging.getLogger("determined_ds")
TRAINERS = "checkpoint-*/global_step*"  # DeepSpeed's files in a checkpoint of transformers' Trainer
READERS = 4  # hashing releases Python's lock


@dataclass(frozen=True, kw_only=True)
class VerifiedEngine:
    """What is exported.

    Args:
        path: The checkpoint's folder.
        engine: Which of its engines, from 0.
        stored: That engine.
        computes_in: The type that the model computes in; None where the checkpoint does not say.
    """

    path: Path
    engine: int
    stored: StoredEngine
    computes_in: torch.dtype | None


def open_engine(path: Path, engine: int) -> VerifiedEngine:
    """Open an engine of a checkpoint that was verified.

    Args:
        path: The checkpoint's folder.
        engine: From 0.

    Raises:
        CheckpointError: it has no such engine, or one that no other ranks can read.
    """
    folder = path / f"model{engine}"
    of_transformers = next(path.glob(TRAINERS), None)
    if of_transformers is not None and engine == 0:
        folder = of_transformers
    if not folder.is_dir():
        there = sorted(found.name.removeprefix("model") for found in path.glob("model*") if found.is_dir())
        raise CheckpointError(
            f"checkpoint {path} has no engine {engine}; it has: {', '.join(there) or 'none'}\n"
            "  fix: --engine with one of them"
        )
    stored = stored_weights(folder)
    return VerifiedEngine(path=path, engine=engine, stored=stored, computes_in=_computes_in(path))


def verify(path: Path, read: Callable[[int], None]) -> None:
    """Compare a checkpoint with its manifest.

    Args:
        path: Its folder.
        read: Called with the bytes that were read, by several threads.

    Raises:
        CheckpointError: it is damaged.
    """
    with ThreadPoolExecutor(READERS) as readers:
        shares = [
            readers.submit(damage_in_share, path, share, READERS, read=read) for share in range(READERS)
        ]
        damages = [each.result() for each in shares]
    if damage := next((each for each in damages if each), None):
        raise CheckpointError(f"checkpoint {path} is damaged: {damage}\n  fix: export another checkpoint")
    if not is_sealed(path):
        logger.warning("warning: %s", unverified(str(path)))


def _computes_in(path: Path) -> torch.dtype | None:
    try:
        ds_config: Any = json.loads((path / LOAD_DATA).read_text())["deepspeed_config"] or {}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    types = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
    enabled = [types[key] for key in types if (ds_config.get(key) or {}).get("enabled") is True]
    return enabled[0] if enabled else torch.float32
