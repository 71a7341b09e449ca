"""Checkpoints as files: which there are, and whether they still are what was written. Loads no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.index import index_damages
from determined_ds.rundir.handed_on import VERIFIED

METADATA = "metadata.json"
MANIFEST = "manifest.json"
# As metadata.json has them, and in this order; other keys were added by the user.
METADATA_KEYS = ("determined_version", "steps_completed", "framework", "format")
THEIR_STATE = "trial_state.pkl"  # in a checkpoint of Determined's own loop
PARTIAL = ".partial"  # suffix of one that is being written
CHUNK_BYTES = 2**20
READERS = 8  # threads that read files to verify them
STAYS_VERIFIED_S = 600.0  # after it was read whole
_VERIFIED_AT: dict[str, float] = {}  # checkpoints that this process has read whole -> when


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

    One that is incomplete has another name: see :class:`~determined_ds.train.local_core.AtomicStorage`.
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
    return next(damages_of(path), None)


def damages_of(path: Path, *, read: Callable[[int], None] | None = None) -> Iterator[str]:
    """Everything that is wrong with a checkpoint, see :func:`damage_of`.

    Args:
        path: Its folder.
        read: As for :func:`fingerprint`; threads call it.
    """
    whole = True
    for damage in _manifest_damages(path, share=None, read=read, readers=min(READERS, os.cpu_count() or 1)):
        whole = False
        yield damage
    if whole and (path / MANIFEST).is_file():
        _VERIFIED_AT[_identity(path)] = time.monotonic()
    if whole:
        yield from index_damages(path)


def damage_in_share(path: Path, index: int, count: int) -> str | None:
    """As :func:`damage_of`, reading only every ``count``-th file from ``index`` on: one rank's share.

    What the launcher of this rank has read whole is not read again; its files are still there, and of their sizes.
    """
    contents = _identity(path) not in os.environ.get(VERIFIED, "").split(",")
    damage = next(_manifest_damages(path, share=(index, count), contents=contents), None)
    if damage is None and not index:  # the small files, which one rank reads
        damage = next(index_damages(path), None)
    return damage


def verified_here() -> str:
    """The checkpoints that this process has just read whole, for the ranks that it starts."""
    since = time.monotonic() - STAYS_VERIFIED_S
    return ",".join(identity for identity, at in _VERIFIED_AT.items() if at >= since)


def _identity(path: Path) -> str:
    """Of a checkpoint, by its manifest; "-" without one."""
    try:
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return "-"


def _manifest_damages(
    path: Path,
    *,
    share: tuple[int, int] | None,
    read: Callable[[int], None] | None = None,
    readers: int = 1,
    contents: bool = True,
) -> Iterator[str]:
    """What is wrong with the files by the manifest: those of a share, read by so many threads; or their sizes alone."""
    if not (path / MANIFEST).is_file():
        if (path / "trial_state.json").exists():  # ours, and ours have one
            yield f"{MANIFEST} is missing"
        elif not any((path / name).is_file() for name in (METADATA, THEIR_STATE)):
            yield f"{METADATA} is missing"
        return
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        whole = content["sha256"] == _digest(content)
        files: dict[str, Any] = content["files"]
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        yield f"{MANIFEST} is not what was written"
        return
    yield from _metadata_damage(path / METADATA, content["metadata_sha256"])
    names: list[str] = list(files)
    if share is not None:
        names = names[share[0] :: share[1]]

    def damage(name: str) -> str | None:
        return _file_damage(path / name, name, files[name], read, contents=contents)

    if readers == 1:
        yield from filter(None, map(damage, names))
        return
    with ThreadPoolExecutor(readers) as threads:
        yield from filter(None, threads.map(damage, names))


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
    file: Path, name: str, expected: Mapping[str, Any], read: Callable[[int], None] | None, *, contents: bool
) -> str | None:
    try:
        size = file.stat().st_size
    except OSError:
        return f"{name} is missing"
    if size != expected["bytes"]:
        return f"{name} has {size} bytes, {expected['bytes']} were written"
    try:
        found = fingerprint(file, read=read) if contents else expected
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == expected else f"{name} is not what was written (its checksum differs)"


def sync_to_disk(path: Path) -> None:
    """Have the system put a folder's files on the disk, so that a rename after it can be trusted."""
    for file in [*path.rglob("*"), path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
