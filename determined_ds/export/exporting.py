"""``det-ds checkpoint export``: the files of an export, written aside and renamed when they are complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from determined_ds.errors import CheckpointError
from determined_ds.export.outgoing import Outgoing, weights_of
from determined_ds.export.pretrained_folder import plan_huggingface
from determined_ds.export.tensor_files import write_safetensors, write_torch
from determined_ds.export.verified_engine import VerifiedEngine, open_engine, verify
from determined_ds.export.wanted import (
    HUGGINGFACE,
    TORCH,
    TYPES,
    ExportPlan,
    ExportRequest,
    Stage,
    refused,
    unseen,
)
from determined_ds.memory.units import format_bytes
from determined_ds.protocol.checkpoint_files import PARTIAL, sync_to_disk
from determined_ds.protocol.exhausted import room_in
from determined_ds.protocol.run_dir import existing
from determined_ds.runtime.checkpoints.contents import only_data
from determined_ds.runtime.checkpoints.folders import bytes_of
from determined_ds.runtime.checkpoints.weights import averages_in

OTHER_BYTES = 2**20  # headers, indexes and small files


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Args:
        out: Where.
        num_tensors: Of them.
        num_bytes: Of the tensors.
        notes: What the user should know.
    """

    out: Path
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def export(request: ExportRequest, stage: Stage = unseen) -> Exported:
    """Export a checkpoint.

    Args:
        request: What, and where to.
        stage: Shows how far it is.

    Raises:
        ConfigError: the request cannot be met.
        CheckpointError: the checkpoint is damaged, or lacks what was requested.
    """
    config = request.config and request.config.absolute()
    out, path, code = (each.absolute() for each in (request.out, request.path, request.context_dir))
    request = replace(request, path=path, out=out, config=config, context_dir=code)
    check_target(path, out, force=request.force)
    with stage("verify", bytes_of(path)) as read:
        verify(path, read)
    with only_data(), _planned(request) as plan:
        num_bytes = sum(each.num_bytes for each in plan.tensors.values())
        check_disk(out, num_bytes)
        with stage("write", num_bytes) as advance, aside(out, force=request.force) as made:
            plan.write(made, advance)
    return Exported(out=out, num_tensors=len(plan.tensors), num_bytes=num_bytes, notes=plan.notes)


@contextlib.contextmanager
def _planned(request: ExportRequest) -> Iterator[ExportPlan]:
    source = open_engine(request.path, request.engine)
    averages = averages_of(source, request.average)
    if request.to == HUGGINGFACE:
        with plan_huggingface(request, source, averages) as plan:
            yield plan
        return
    if request.merge_lora:
        raise refused("--merge-lora", None, f"is for --to {HUGGINGFACE}", "leave it out")
    tensors = weights_of(source, None if request.dtype is None else TYPES[request.dtype], averages)
    if request.to == TORCH:
        aliases = source.stored.index.aliases
        yield ExportPlan(tensors=tensors, write=partial(write_torch, tensors=tensors, aliases=aliases))
    else:
        yield ExportPlan(tensors=tensors, write=partial(_write_shards, tensors=tensors, request=request))


def _write_shards(
    out: Path, advance: Callable[[int], None], *, tensors: Mapping[str, Outgoing], request: ExportRequest
) -> None:
    out.mkdir()
    write_safetensors(out, tensors, request.shard_bytes, advance)


def averages_of(source: VerifiedEngine, callback: str | None) -> dict[str, torch.Tensor]:
    """Name in the index -> average of an ``EMA``; none where none is asked for.

    Raises:
        CheckpointError: the checkpoint holds no such average.
    """
    if callback is None:
        return {}
    found = averages_in(source.path, source.engine, callback)
    names = {name: source.stored.name_of(name) for name in found}
    if strangers := [name for name, own in names.items() if own is None]:
        raise CheckpointError(f"checkpoint {source.path} averages {strangers[0]}, and has no such weight")
    return {own: found[name] for name, own in names.items() if own is not None}


# ------------------------------------------------------------------------------------------- the target


def check_target(path: Path, out: Path, *, force: bool) -> None:
    """Refuse a target that is there, or in the checkpoint.

    Raises:
        ConfigError: it is one of these.
    """
    if out.resolve().is_relative_to(path.resolve()):
        message = "lies in the checkpoint, whose manifest lists its files"
        raise refused("--out", str(out), message, "name a folder outside it")
    if path.resolve().is_relative_to(out.resolve()):
        raise refused("--out", str(out), "holds the checkpoint, and would be replaced", "name another folder")
    if out.exists() and not force:
        raise refused("--out", str(out), "exists already", "name another, or add --force to replace it")


def check_disk(out: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk has no room for.

    Raises:
        CheckpointError: it has none.
    """
    folder = existing(out.absolute().parent)
    if num_bytes + OTHER_BYTES > shutil.disk_usage(folder).free:
        raise CheckpointError(
            f"no space left on the disk of {out}: {room_in(folder)}, the export takes {format_bytes(num_bytes)}\n"
            "  fix: free some space, or --out on another disk; --dtype bf16 takes half of fp32"
        )


@contextlib.contextmanager
def aside(out: Path, *, force: bool) -> Iterator[Path]:
    """A name beside a target, which takes its place when all is written; nothing is left where that fails."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    made = out.with_name(f".{out.name}.{os.getpid()}{PARTIAL}")
    try:
        yield made
        sync_to_disk(made)
        if force and out.exists():
            old = out.with_name(f".{out.name}.{os.getpid()}.old")
            out.rename(old)
            made.rename(out)
            remove(old)
        else:
            made.rename(out)
    finally:
        remove(made)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
