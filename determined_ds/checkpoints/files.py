"""Checkpoints as files: which there are, whether they are what was written, and which ranks can read them.

Loads no torch. ``manifest.json`` has the size and checksum of each file, and a checksum of itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from determined_ds.checkpoints.index import ENGINES, INDEX_NAME

T = TypeVar("T")
logger = logging.getLogger("determined_ds")

METADATA, MANIFEST, LOAD_DATA = "metadata.json", "manifest.json", "load_data.json"
# Where training stood: ours, and Determined's own loop's.
STATE, THEIR_STATE = "trial_state.json", "trial_state.pkl"
PART = "det_state_dict_rank{}.pth"
PARTIAL = ".partial"  # suffix of one that is being written
CHUNK_BYTES = 2**20
VERIFIED = "DET_DS_VERIFIED"  # environment of a rank: which checkpoints its launcher has read whole
READERS = 8  # threads that read files to verify them
_READ_WHOLE: deque[str] = deque(maxlen=16)  # the last ones that this process has
DATA_FIX = (
    "resume with the replicas and the micro-batch that wrote it, or start anew with data that is one stream for all "
    "replicas: self.training_loader(dataset), without sharded=True"
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk."""

    uuid: str
    steps_completed: int  # batches trained when it was written; -1 if unknown
    path: Path  # its folder


@dataclass(kw_only=True)
class TrialState:
    """Where training stands."""

    trial_id: int = 0  # the trial that wrote it; another trial that starts from it counts from 0
    batches_trained: int = 0  # optimizer steps since the start of training
    epochs_trained: int = 0  # whole epochs among them
    last_validation: int = -1  # batches_trained at the last validation
    last_checkpoint: int = -1  # batches_trained at the last checkpoint
    kept: list[str] = field(default_factory=list)  # uuids of the existing checkpoints, oldest first
    best: str = ""  # uuid of the one whose validation was best
    # Batches of the data that were left out before the last trained one, the first and the last of each range.
    skipped: list[tuple[int, int]] = field(default_factory=list)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty where there is none, or it cannot be read."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint in a folder."""
    stated = {**read_object(path / METADATA), **read_object(path / MANIFEST)}.get("steps_completed")
    steps = stated if isinstance(stated, int) else -1
    return Checkpoint(uuid=path.name, steps_completed=steps, path=path)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a folder, the one that has trained longest first.

    One that is incomplete has another name, see :class:`~determined_ds.train.local_core.AtomicStorage`.
    """
    found = []
    for path in filter(Path.is_dir, folder.glob("[!.]*")):
        with contextlib.suppress(FileNotFoundError):  # a run that keeps only some has deleted it meanwhile
            found.append((checkpoint_at(path), path.stat().st_mtime))
    found.sort(key=lambda each: (each[0].steps_completed, each[1], each[0].uuid), reverse=True)
    return [checkpoint for checkpoint, _ in found]


def newest_good(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint | None, list[str]]:
    """The first checkpoint that is intact, and what is wrong with those before it."""
    damages: list[str] = []
    for checkpoint in checkpoints:
        if (damage := damage_of(checkpoint.path)) is None:
            return checkpoint, damages
        damages.append(f"checkpoint {checkpoint.uuid} is damaged: {damage}")
    return None, damages


def remove_partial(folder: Path) -> None:
    """Remove incomplete checkpoints; no process may be writing them."""
    for path in folder.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def sizes_in(path: Path) -> dict[str, int]:
    """Relative name -> bytes of each file in a folder, sorted; a run may be deleting it."""
    sizes = {}
    for file in sorted(path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                sizes[str(file.relative_to(path))] = file.stat().st_size
    return sizes


def files_of(path: Path) -> list[str]:
    """The relative names of a checkpoint's files, without manifest and metadata, sorted."""
    return sorted(sizes_in(path).keys() - {MANIFEST, METADATA})


# ------------------------------------------------------------------------------------------- written


def fingerprint(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, as a manifest has them."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_manifest(path: Path, files: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write ``metadata.json``, and the manifest: the fingerprint of each other file, and one of the manifest itself.

    Determined writes ``metadata.json`` too, and a user may add to it; to object storage Determined sends what was there
    before it wrote.

    Args:
        path: The checkpoint's folder.
        files: Relative name -> fingerprint, ``metadata.json`` not among them.
        metadata: What that holds.

    Source: ``_store_path_sharded`` in determined 0.38.1's ``core/_checkpoint.py``.
    """
    (path / METADATA).write_text(json.dumps(metadata, indent=2))
    content = {
        "steps_completed": metadata["steps_completed"],
        "files": dict(sorted(files.items())),
    }
    content["sha256"] = _digest(content)
    (path / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def _digest(content: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def put_on_disk(path: Path) -> None:
    """Have the system put a file or the names in a folder on the disk, before anything that relies on it."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_to_disk(path: Path) -> None:
    """Put a folder and all in it on the disk, so that a rename after it can be trusted."""
    for file in [*path.rglob("*"), path]:
        put_on_disk(file)


# ------------------------------------------------------------------------------------------- whether it can be read


def warn_if_unverified(path: Path, name: str = "") -> None:
    """Warn of a checkpoint without a manifest, as Determined's own loop writes it."""
    if not (path / MANIFEST).is_file():
        words = "warning: checkpoint %s has no %s: its files are unverified, and may not be what was written"
        logger.warning(words, name or path, MANIFEST)


def damage_of(path: Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a checkpoint, or None; see :func:`damages_of`."""
    return next(damages_of(path, share=share), None)


def damages_of(path: Path, *, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Everything that is wrong with a checkpoint: files that are missing, or not what was written.

    One without a manifest, as Determined's own loop writes it, is trusted; ours have one. What this process has read
    whole is not read again by the ranks that it starts: they look at names and sizes.

    Args:
        path: Its folder.
        share: Which share of its files is read, counted from 0, and of how many: one of each rank.
    """
    if not (path / MANIFEST).is_file():
        if (path / STATE).exists():  # ours, and ours have one
            yield f"{MANIFEST} is missing"
        elif not any((path / name).is_file() for name in (METADATA, THEIR_STATE)):
            yield f"{METADATA} is missing"
        return
    content = read_object(path / MANIFEST)
    files, identity = content.get("files"), content.get("sha256")
    if not isinstance(files, dict) or identity != _digest(content):
        yield f"{MANIFEST} is not what was written"
        return
    was_read = identity in os.environ.get(VERIFIED, "").split(",")

    def damage(name: str) -> str | None:
        file = path / name
        try:
            if (size := file.stat().st_size) != files[name]["bytes"]:
                return f"{name} has {size} bytes, {files[name]['bytes']} were written"
            is_same = was_read or fingerprint(file) == files[name]
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        return None if is_same else f"{name} is not what was written (its checksum differs)"

    is_whole = True
    index, count = share
    with ThreadPoolExecutor(max(1, min(READERS, os.cpu_count() or 1) // count)) as threads:
        for found in filter(None, threads.map(damage, list(files)[index::count])):
            is_whole = False
            yield found
    if is_whole and count == 1:
        _READ_WHOLE.append(identity)


def verified_here() -> str:
    """What :data:`VERIFIED` is for the ranks that this process starts."""
    return ",".join(_READ_WHOLE)


# ------------------------------------------------------------------------------------------- which ranks can read it


def num_writers(path: Path) -> int:
    """How many ranks wrote a checkpoint; 0 if unknown."""
    of_transformers = list(path.glob("checkpoint-*/rng_state_*.pth"))
    return len(list(path.glob(PART.format("*")))) or len(of_transformers)


def written_by(path: Path) -> Mapping[str, Any]:
    """What the ranks that wrote a checkpoint say of themselves; empty where it does not say.

    Returns:
        ``ranks``, ``replicas``, ``micro_batch_size``, ``engine`` (``deepspeed`` or ``ddp``); ``own_layout``: why only
        the same layout can read it, or None; ``data_apart``: the name of a stream that gives each replica
        samples of its own; or None.
    """
    found = read_object(path / LOAD_DATA).get("written_by")
    return found if isinstance(found, dict) else {}


def elastic_refusal(path: Path) -> str | None:
    """Why only the ranks and the strategy that wrote a checkpoint can resume from it; None where any can."""
    if any(path.glob("checkpoint-*")):
        return "transformers' Trainer wrote it, in DeepSpeed's own layout"
    if reason := written_by(path).get("own_layout"):
        return str(reason)
    engines = [each for each in path.glob(ENGINES) if each.is_dir()]
    if not engines:
        return "it holds no engine"
    indexed = all((each / INDEX_NAME).is_file() for each in engines)
    return None if indexed else "DeepSpeed wrote it in its own layout"


def data_refusal(written: Mapping[str, Any], *, replicas: int) -> str | None:
    """Why so many replicas cannot take over a position in the training data; ``written`` as of :func:`written_by`."""
    name, then = written.get("data_apart"), written.get("replicas", replicas)
    if name is None or then == replicas:
        return None
    return (
        f"{name} gives each replica its own samples: there were {then} replicas, and there are {replicas} now"
    )


# ------------------------------------------------------------------------------------------- best, and kept


def as_number(value: Any) -> float | None:
    """A metric as a number, finite or not; None where it is none: a text, a list, a tensor of several numbers."""
    if getattr(value, "size", None) is not None and hasattr(value, "item"):  # of torch or numpy
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # of several numbers
            return None
    return float(value) if isinstance(value, (int, float)) else None


def finite(value: Any) -> float | None:
    """A metric as a number that can be compared; None where it is not finite, or no number."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def is_better(value: Any, best: Any, *, smaller_is_better: bool) -> bool:
    """Whether a validation beats the best one so far (None: there is none); one that is not finite never does."""
    now, before = finite(value), finite(best)
    if now is None or before is None:
        return now is not None
    return now < before if smaller_is_better else now > before


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """The names of the metrics that are numbers and not finite."""
    return [name for name, value in metrics.items() if as_number(value) is not None and finite(value) is None]


def best_of(
    checkpoints: Iterable[Checkpoint], values: Mapping[int, float | None], *, smaller_is_better: bool
) -> Checkpoint | None:
    """The checkpoint with the best validation of its batch; if two are equal, the earlier; None if none is finite.

    ``values``: batch -> the searcher's metric of the validation after it.
    """
    best, best_value = None, None
    for each in sorted(checkpoints, key=lambda each: each.steps_completed):
        value = values.get(each.steps_completed)
        if is_better(value, best_value, smaller_is_better=smaller_is_better):
            best, best_value = each, value
    return best


def over_limit(kept: Sequence[T], limit: int | None, best: T | None) -> list[T]:
    """What a limit on ``kept``, the oldest first, deletes: the oldest, never the best nor the newest."""
    spare = [each for each in kept[:-1] if each != best]
    return spare[: max(0, len(kept) - limit)] if limit else []
