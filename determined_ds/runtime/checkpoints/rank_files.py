"""The files that a rank writes of a checkpoint: its own part, and its share of the engines."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from determined_ds.protocol.metrics_file import put_on_disk
from determined_ds.runtime.checkpoints import contents
from determined_ds.runtime.checkpoints.all_engines import Engines, Taken, Written
from determined_ds.runtime.checkpoints.code_copy import write_code
from determined_ds.runtime.checkpoints.shards import write_files
from determined_ds.trial.author import method_of


def save_part(part: dict[str, Any], file: Path | io.BytesIO, callbacks: Mapping[str, Any]) -> None:
    """Write a rank's own part.

    Args:
        part: What is in it.
        file: Where to.
        callbacks: Name -> callback, of ``part["callbacks"]``.

    Raises:
        CheckpointError: it holds what cannot be written; names its owner.
    """
    try:
        torch.save(part, file)
    except (TypeError, AttributeError, pickle.PicklingError):
        for name, callback in callbacks.items():
            owner = f"callback {name!r}: {method_of(callback, 'state_dict')}"
            contents.check_state(owner, part["callbacks"].get(name))
        contents.check_state("on_checkpoint_save_start of a callback", part)
        raise


def check_part(file: Path | io.BytesIO, part: dict[str, Any], callbacks: Mapping[str, Any]) -> None:
    """Refuse a part that was written and cannot be read back; see :func:`save_part`."""
    if isinstance(file, io.BytesIO):
        file.seek(0)
    contents.check_loadable(file, part, callbacks)


def write_rank_files(
    path: Path,
    written: Written,
    taken: Sequence[Taken],
    files: Mapping[str, bytes],
    with_code: bool,
    send: Callable[[Sequence[str], Callable[[], None]], None] | None,
    beat: Callable[[], None],
) -> Written:
    """Write a rank's files; no collective.

    Args:
        path: The checkpoint's folder.
        written: What of the engines is written already.
        taken: The rest of the engines, as copies that are written beside training.
        files: Name -> content.
        with_code: Whether to copy the trial's code.
        send: Uploads files by their names; None where that is left to the seal.
        beat: Called now and then.

    Returns:
        What this rank has written in all.
    """
    if taken:
        written = Engines.write(path, taken, beat, alone=True)
    marks = {**written.fingerprints, **write_files(path, files)}
    beat()
    if with_code:
        write_code(path)
    if send is not None:
        send(sorted(marks), beat)
    else:
        for name in marks if taken else ():  # so that the seal, which training waits for, finds them there
            put_on_disk(path / name)
    return replace(written, fingerprints=marks, uploaded=send is not None)
