"""Checkpoints as files: which there are, and whether they still are what was written. Loads no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.index import index_damages

METADATA = "metadata.json"
MANIFEST = "manifest.json"
# As metadata.json has them, and in this order; other keys were added by the user.
METADATA_KEYS = ("determined_version", "steps_completed", "framework", "format")
THEIR_STATE = "trial_state.pkl"  # in a checkpoint of Determined's own loop
PARTIAL = ".partial"  # suffix of one that is being written
CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk.

    Args:
        uuid: Its name.
        steps_completed: Batches trained when it was written.
        path: Its folder.
    """

    uuid: str
    steps_completed: int
    path: Path


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in ``folder``, the one that has trained longest first.

    One that is incomplete has another name: see :class:`~determined_ds.runtime.local_core.AtomicStorage`.
    """
    found = []
    for path in folder.glob("*"):
        if path.name.startswith(".") or not path.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, by the run that keeps only some
            found.append((_steps_completed(path), path.stat().st_mtime, path))
    found.sort(reverse=True)
    return [Checkpoint(uuid=path.name, steps_completed=steps, path=path) for steps, _, path in found]


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    return Checkpoint(uuid=path.name, steps_completed=_steps_completed(path), path=path)


def restored_by(uuid: str | None, folder: Path | None) -> str | None:
    """What a core context without a cluster restores a checkpoint by: its uuid, or the path of its folder.

    Args:
        uuid: Of the checkpoint; None where there is none.
        folder: Its own, where it is another run's.
    """
    return uuid if folder is None else str(folder)


def remove_partial(folder: Path) -> None:
    """Remove incomplete checkpoints; no process may be writing them."""
    for path in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _steps_completed(path: Path) -> int:
    """-1 where neither of its two files can be read."""
    for name in (MANIFEST, METADATA):
        try:
            return int(json.loads((path / name).read_text())["steps_completed"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return -1


def newest_good_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is intact, and what is wrong with newer ones."""
    damages: list[str] = []
    for checkpoint in checkpoints_in(folder):
        damage = damage_of(checkpoint.path)
        if damage is None:
            return checkpoint, damages
        damages.append(f"checkpoint {checkpoint.uuid} is damaged: {damage}")
    return None, damages


def files_of(path: Path) -> list[str]:
    """The relative names of a checkpoint's files, without manifest and metadata, sorted."""
    names = (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    return sorted(name for name in names if name not in (MANIFEST, METADATA))


def fingerprint(file: Path, *, read: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Size and checksum of a file.

    Args:
        file: To read.
        read: Called with the number of bytes of each part that was read.
    """
    digest = hashlib.sha256()
    size = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            if read is not None:
                read(len(chunk))
    return {"bytes": size, "sha256": digest.hexdigest()}


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """``metadata.json`` as Determined's core context writes it (``_write_metadata_file``, 0.38.1)."""
    return json.dumps(metadata, indent=2)


def write_manifest(path: Path, files: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write ``metadata.json``, and the manifest: the fingerprint of each file, and one of the manifest itself.

    Determined writes ``metadata.json`` too, but to object storage it sends what was there before it did.

    Args:
        path: The checkpoint's folder.
        files: Relative name -> fingerprint, ``metadata.json`` not among them.
        metadata: What that holds.

    Source: ``_store_path_sharded`` in determined 0.38.1's ``core/_checkpoint.py``.
    """
    (path / METADATA).write_text(metadata_text(metadata))
    content = {
        "steps_completed": metadata["steps_completed"],
        "metadata_sha256": _metadata_digest(metadata),
        "files": dict(sorted(files.items())),
    }
    content["sha256"] = _digest(content)
    (path / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def _digest(content: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _metadata_digest(metadata: Mapping[str, Any]) -> str:
    """One checksum for every order of the keys: ``det checkpoint download`` writes them in the master's."""
    written = {key: metadata[key] for key in METADATA_KEYS if key in metadata}
    return hashlib.sha256(metadata_text(written).encode()).hexdigest()


def is_sealed(path: Path) -> bool:
    """Whether a checkpoint has a manifest to compare its files with."""
    return (path / MANIFEST).is_file()


def num_writers(path: Path) -> int:
    """How many ranks wrote a checkpoint; 0 if unknown."""
    of_transformers = list(path.glob("checkpoint-*/rng_state_*.pth"))
    return len(list(path.glob("det_state_dict_rank*.pth"))) or len(of_transformers)


def unverified(name: str) -> str:
    """The warning about a checkpoint without a manifest."""
    return f"checkpoint {name} has no {MANIFEST}: its files are unverified, and may not be what was written"


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file is what was written.

    A checkpoint without a manifest, as Determined's own loop writes it, is trusted. In object storage it has no
    ``metadata.json`` either.
    """
    return next(_damages(path, share=None), None)


def damages_of(path: Path, *, read: Callable[[int], None] | None = None) -> Iterator[str]:
    """Everything that is wrong with a checkpoint, see :func:`damage_of`.

    Args:
        path: Its folder.
        read: As for :func:`fingerprint`.
    """
    return _damages(path, share=None, read=read)


def damage_in_share(
    path: Path, index: int, count: int, *, read: Callable[[int], None] | None = None
) -> str | None:
    """As :func:`damage_of`, reading only every ``count``-th file from ``index`` on: one rank's share."""
    return next(_damages(path, share=(index, count), read=read), None)


def _damages(
    path: Path, share: tuple[int, int] | None, read: Callable[[int], None] | None = None
) -> Iterator[str]:
    whole = yield from _manifest_damages(path, share, read)
    if whole and (share is None or not share[0]):  # the small files, which one rank reads
        yield from index_damages(path)


def _manifest_damages(
    path: Path, share: tuple[int, int] | None, read: Callable[[int], None] | None
) -> Generator[str, None, bool]:
    """Files that are not what the manifest says. Returns whether there may be more to find in them."""
    if not (path / MANIFEST).is_file():
        if (path / "trial_state.json").exists():  # ours, and ours have one
            yield f"{MANIFEST} is missing"
            return False
        if not any((path / name).is_file() for name in (METADATA, THEIR_STATE)):
            yield f"{METADATA} is missing"
            return False
        return True
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        whole = content["sha256"] == _digest(content)
        files: dict[str, Any] = content["files"]
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        yield f"{MANIFEST} is not what was written"
        return False
    damages = list(_metadata_damage(path / METADATA, content["metadata_sha256"]))
    yield from damages
    names: Iterable[str] = list(files)
    if share is not None:
        names = list(files)[share[0] :: share[1]]
    for name in names:
        for damage in _file_damage(path / name, name, files[name], read):
            damages.append(damage)
            yield damage
    return not damages


def _metadata_damage(file: Path, expected: str) -> Iterator[str]:
    """It may be missing: the manifest has what is needed, and earlier ones in object storage have none."""
    try:
        intact = _metadata_digest(json.loads(file.read_bytes())) == expected
    except FileNotFoundError:
        return
    except (ValueError, TypeError):
        intact = False
    if not intact:
        yield f"{METADATA} is not what was written"


def _file_damage(
    file: Path, name: str, expected: Mapping[str, Any], read: Callable[[int], None] | None
) -> Iterator[str]:
    try:
        size = file.stat().st_size
    except OSError:
        yield f"{name} is missing"
        return
    if size != expected["bytes"]:
        yield f"{name} has {size} bytes, {expected['bytes']} were written"
        return
    try:
        found = fingerprint(file, read=read)
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror}"
        return
    if found != expected:
        yield f"{name} is not what was written (its checksum differs)"


def sync_to_disk(path: Path) -> None:
    """Have the system put a folder's files on the disk, so that a rename after it can be trusted."""
    for file in [*path.rglob("*"), path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
