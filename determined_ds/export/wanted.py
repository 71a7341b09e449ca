"""What is to be exported, and what will be written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.export.outgoing import Outgoing

HUGGINGFACE, SAFETENSORS, TORCH = FORMATS = ("huggingface", "safetensors", "torch")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export.

    Args:
        path: The checkpoint's folder.
        to: One of ``FORMATS``.
        out: The folder, or with ``torch`` the file, to make.
        engine: Of the trial's, from 0.
        dtype: A key of ``TYPES``; None: as the model computes.
        average: The name of an ``EMA`` whose averages are taken; None: the weights themselves.
        merge_lora: Whether adapters are merged into the weights.
        shard_bytes: Most of one file of safetensors.
        config: A folder with the config.json and the files of the Hugging Face model; None: those of the trial.
        context_dir: With the code of the trial.
        own_code: Whether the checkpoint's copy of the code is taken in place of it.
        force: Whether ``out`` is replaced.
    """

    path: Path
    to: str
    out: Path
    engine: int = 0
    dtype: str | None = None
    average: str | None = None
    merge_lora: bool = False
    shard_bytes: int = 5 * 10**9
    config: Path | None = None
    context_dir: Path = Path()
    own_code: bool = False
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What will be written.

    Args:
        tensors: The tensors, for the size.
        write: Writes all files into a folder, or to a file.
        notes: What the user should know.
    """

    tensors: Mapping[str, Outgoing]
    write: Callable[[Path, Callable[[int], None]], None]
    notes: tuple[str, ...] = ()


# (what begins, its bytes) -> within it, called with the bytes that are done.
Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextlib.contextmanager
def unseen(said: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A :data:`Stage` that shows nothing."""
    yield lambda count: None


def refused(option: str, value: Any, message: str, fix: str) -> ConfigError:
    """The error of an option that cannot be met."""
    given = {} if value is None else {"value": value}
    return ConfigError(Problem(key=option, message=message, fix=fix, code="export", **given))
