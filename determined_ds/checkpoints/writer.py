"""The checkpoints of a run: written at once, or from copies while training continues; and read back.

1. The engines are copied to host memory, and the small parts of this rank beside them.
2. A thread of each rank writes its files into the folder, which is not a checkpoint yet, and computes their checksums.
3. Ranks learn with the exchange that asks for stop requests that all have written.
4. They seal it together: indexes, manifest, and the new name, or the upload and the report to the master.

Written at once, 2 follows 1 without copies, and 4 follows immediately. The thread takes part in no exchange.

The layout is Determined's, with a manifest:

    <uuid>/metadata.json                 steps_completed ...; Determined's
           manifest.json                 size and checksum of every file
           load_data.json                experiment config and hyperparameters
           trial_state.json              where training stands
           code/...                      on a cluster: the context directory
           det_state_dict_rank<R>.pth    generators, callbacks, reducers, unreported metrics, position in a stream
           model<I>/...                  each engine, see :mod:`~determined_ds.checkpoints.engines`
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import determined as det
import psutil
import torch
from determined.errors import CheckpointNotFound
from torch.utils._pytree import tree_leaves

from determined_ds.checkpoints.engines import Engines, Written, overrides, write_files
from determined_ds.checkpoints.files import PART, TrialState, damage_of, over_limit, warn_if_unverified
from determined_ds.checkpoints.rank_state import RankParts, read_state
from determined_ds.checkpoints.safe_load import engines_load_only_data, read_data
from determined_ds.checkpoints.settings import put_into_effect
from determined_ds.checkpoints.storage import all_but, seal_folder, share_of, write_code
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.memory.units import MIB, format_bytes
from determined_ds.report.numbers import count
from determined_ds.rundir.limits import exhausted
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.seeds import rng_state
from determined_ds.train.local_core import AtomicStorage
from determined_ds.train.rank import cluster_info, ending_of
from determined_ds.trial.returned import method_of

T = TypeVar("T")
# Where nothing is stated, a rank that writes less does so at once: it takes about as long as to agree that it was
# written.
SMALL_BYTES = 16 * MIB
CGROUP = Path("/sys/fs/cgroup")
NICENESS = 10
ENDS_WITHIN_S = 10.0  # a disk that hangs does not keep a rank that has failed


@dataclass(kw_only=True)
class Pending:
    """A checkpoint that is not sealed yet."""

    uuid: str
    path: Path  # its folder for now
    closing: contextlib.ExitStack  # puts it into storage
    metadata: dict[str, Any]
    batch: int  # batches trained
    state: TrialState  # where training stands, by now further than this checkpoint
    began_s: float = field(default_factory=time.monotonic)
    writing: Future[Written] = field(default_factory=Future)  # what the thread does for it


class Checkpoints:
    """Writes and reads the checkpoints of a run.

    Args:
        trial: Its ``save`` and ``load`` write and read the engines.
        context: Its core context stores the files, here or on the cluster.
        callbacks: Name -> callback; their state is kept.
        parts: Name -> what else has a ``state_dict`` and ``load_state_dict`` on each rank; others may be added before
            anything is saved or loaded.
        total_limit: Checkpoints to keep at most, always with the best and the newest; None: all.
        warm_start: ``weights`` or ``all``: what is loaded from another trial's checkpoint.
        note: Shows a line to the user.
    """

    def __init__(
        self,
        trial: Any,
        context: Any,
        callbacks: dict[str, Any],
        parts: dict[str, Any],
        total_limit: int | None = None,
        *,
        warm_start: str = "weights",
        note: Callable[[str], None] = print,
    ) -> None:
        self.parts = parts
        self._trial = trial
        self._context = context
        self._distributed = context.distributed
        self._callbacks = callbacks
        self._total_limit = total_limit
        self._warm_start = warm_start
        self._note = note
        self._engines = context.engine_files = Engines(trial, context)
        self._own_parts = RankParts(trial, context)
        self._storage: Any = getattr(context._core.checkpoint, "_storage_manager", None)
        self._is_local = isinstance(self._storage, AtomicStorage)
        self._thread = WriterThread()
        self._pending: Pending | None = None
        self._deleting: Future[None] | None = None
        self._buffers: dict[int, torch.Tensor] | None = None  # None: every checkpoint is written at once

    def _call_back(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for callback in self._callbacks.values():
            getattr(callback, hook)(*args, **kwargs)

    # -------------------------------------------------------------------------------------------- beside training

    def prepare(self, asynchronous: bool | None) -> None:
        """Decide, before training, whether checkpoints are written while it continues; a collective.

        Args:
            asynchronous: As stated; None: where a rank writes much, the trial has no ``save`` of its own, and memory
                suffices.

        Raises:
            ConfigError: it is stated, and the machine has not the memory.
        """
        engines, distributed = self._engines, self._distributed
        lack = engines.own_layouts[0] if all(engines.own_layouts) else ""
        if asynchronous is False or (asynchronous is None and (lack or overrides(self._trial, "save"))):
            return
        if not lack:
            copy_bytes = engines.copy_bytes()
            for owner in (*self._callbacks.values(), *self.parts.values()):
                # It may need something from training: then the checkpoint says so.
                with contextlib.suppress(Exception):
                    copy_bytes += sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(owner.state_dict()))
            ranks = distributed.allgather((distributed.cross_rank, copy_bytes, _available_bytes()))
            if asynchronous is None and max(copy for _, copy, _ in ranks) < SMALL_BYTES:
                return
            for machine in {machine for machine, _, _ in ranks}:
                copies, left = zip(*(each[1:] for each in ranks if each[0] == machine), strict=True)
                if sum(copies) > min(left):
                    lack = f"copies of what {count(len(copies), 'rank')} of a machine write take "
                    lack += f"{format_bytes(sum(copies))} of host memory, and {format_bytes(min(left))} are available"
        if lack and asynchronous:
            key = "hyperparameters.fit.asynchronous_checkpoints"
            fix = (
                "leave it out, and checkpoints are written while training waits; or use fewer slots a machine"
            )
            raise ConfigError(Problem(key=key, value=True, message=lack, fix=fix, code="host-memory"))
        if lack:
            self._note(f"note        checkpoints are written while training waits: {lack}")
        else:
            self._buffers = {}

    @property
    def batch_in_writing(self) -> int | None:
        """Batches trained at the checkpoint that is not sealed yet; None where there is none."""
        return None if self._pending is None else self._pending.batch

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its files of the checkpoint that is not sealed yet."""
        return self._pending is not None and self._pending.writing.done()

    # -------------------------------------------------------------------------------------------- save

    def save(self, state: TrialState, *, best: bool = False, waits: bool = True) -> None:
        """Write a checkpoint; a collective.

        Args:
            state: Where training stands; the new checkpoint is added to it.
            best: The validation before it was the best so far.
            waits: Return when it is complete. Otherwise it may be written while training continues, until
                :meth:`finish`.

        Raises:
            CheckpointError: it, or the one before it, could not be written.
        """
        if self._pending is not None:
            if not self.is_written:
                batch = self._pending.batch
                self._note(f"waiting     for the checkpoint of batch {batch}, which is still written")
            self.finish()
        state.last_checkpoint = state.batches_trained
        metadata = {
            "determined_version": det.__version__,
            "steps_completed": state.batches_trained,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
        }
        closing = contextlib.ExitStack()
        path, uuid = closing.enter_context(self._context._core.checkpoint.store_path(metadata, shard=True))
        path.mkdir(parents=True, exist_ok=True)
        state.kept.append(uuid)
        state.best = uuid if best else state.best
        batch = state.batches_trained
        pending = Pending(uuid=uuid, path=path, closing=closing, metadata=metadata, batch=batch, state=state)
        at_once = waits or self._buffers is None
        self._engines.buffers = None if at_once else self._buffers
        try:
            work = self._take(pending, at_once=at_once)
            if at_once:
                self._seal(pending, work(HEART.beat))
                return
        except BaseException:
            if self._is_local:  # such as a full disk: what there is of it takes no room
                shutil.rmtree(path, ignore_errors=True)
            raise
        pending.writing = self._thread.submit(work)
        self._pending = pending

    def _take(self, pending: Pending, *, at_once: bool) -> Callable[[Callable[[], None]], Written]:
        """Take what this rank writes, and write what only this thread can; a collective.

        Returns:
            What writes the rest, without a collective; it gets a function to call now and then.
        """
        path, engines, is_chief = pending.path, self._engines, self._distributed.rank == 0
        checkpoint: dict[str, Any] = {
            "callbacks": {name: callback.state_dict() for name, callback in self._callbacks.items()},
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "rng_state": rng_state(self._context.device),
            "built": engines.built,
            "place": dict(vars(self._own_parts.here)),
        }
        self._call_back("on_checkpoint_save_start", checkpoint)
        engines.written, engines.jobs = None, []
        self._trial.save(self._context, path) if overrides(self._trial, "save") else engines.save(path)
        written, jobs = engines.written or Written(), engines.jobs
        part = self._own_parts.taken(checkpoint, at_once=at_once)
        HEART.beat()
        texts: dict[str, bytes] = {}
        if is_chief:
            texts = self._own_parts.state_files(pending.state, engines.own_layout(), self.parts.get("data"))
        storage, info = None, cluster_info()
        is_trial = not at_once and info is not None and info.task_type == "TRIAL"
        if info is not None and is_trial and not self._storage.store_path_is_direct_access():
            storage = info.trial._config["checkpoint_storage"]

        def write(beat: Callable[[], None]) -> Written:
            for job in jobs:
                job(beat)
            own = write_files(path, {PART.format(self._distributed.rank): part(), **texts})
            written.fingerprints.update(own)
            beat()
            if is_chief and not self._is_local:  # off-cluster the context directory is at hand
                write_code(path)
            if storage is not None:
                from determined_ds.checkpoints.upload import upload

                upload(storage, path, pending.uuid, sorted(written.fingerprints), beat)
            written.uploaded = storage is not None
            return written

        return write

    # -------------------------------------------------------------------------------------------- seal

    def finish(self) -> None:
        """Complete the checkpoint that is not sealed yet, once every rank has written it; a collective.

        Raises:
            CheckpointError: on all ranks, where one could not write.
        """
        if self._pending is not None:
            pending, failure = self._pending, None
            with HEART.patiently():  # a storage may be slow
                if (error := pending.writing.exception()) is not None:
                    words = (
                        exhausted(error, self._context._run_dir.path) or f"{type(error).__name__}: {error}"
                    )
                    failure = (words.removeprefix("error: "), ending_of(error).code)
                failures = self._distributed.allgather(failure)
            self._pending = None
            if any(failures):
                self._give_up(pending, failures, error)
            self._seal(pending, pending.writing.result())

    def abandon(self) -> None:
        """The run ends without :meth:`finish`, or has nothing left to write: end what this rank writes."""
        if self._pending is None and self._deleting is not None:
            wait([self._deleting], timeout=ENDS_WITHIN_S)
        self._thread.abandon()

    def _give_up(self, pending: Pending, failures: list[Any], own: BaseException | None) -> None:
        """Remove a checkpoint that is not sealed, and raise why it could not be written; a collective."""
        self.abandon()
        if self._distributed.local_rank == 0:
            shutil.rmtree(pending.path, ignore_errors=True)
        if self._distributed.rank == 0 and not self._is_local:
            with contextlib.suppress(Exception):  # it may be what is out of reach
                self._storage.delete(pending.uuid, ["**/*"])
        rank, (words, exit_code) = next((rank, each) for rank, each in enumerate(failures) if each)
        sealed = pending.state.kept[:-1]
        last = f"the last one is {sealed[-1]}" if sealed else "there is none before it"
        fix = "" if "\n  fix: " in words else "\n  fix: remove the cause, then add --resume"
        failed = CheckpointError(
            f"the checkpoint of batch {pending.batch} could not be written, and {last}: rank {rank}: {words}{fix}"
        )
        failed.exit_code = exit_code
        raise failed from own

    def _seal(self, pending: Pending, written: Written) -> None:
        """Make the files that all ranks have written a checkpoint; a collective."""
        path, uuid, core_checkpoints = pending.path, pending.uuid, self._context._core.checkpoint
        self._engines.write_indexes(path, written)
        HEART.beat()
        self._call_back("on_checkpoint_end", str(path))
        self._call_back("on_checkpoint_write_end", str(path))
        seal_folder(path, pending.metadata, written.fingerprints, self._distributed)
        there = self._distributed.allgather(list(written.fingerprints) if written.uploaded else [])
        with HEART.patiently(), all_but(self._storage, {name for names in there for name in names}):
            pending.closing.close()
        took = f"  written in {time.monotonic() - pending.began_s:.1f} s" if pending.writing.done() else ""
        self._note(f"checkpoint  batch {pending.batch}  {uuid}{took}")
        self._call_back("on_checkpoint_upload_end", uuid=uuid)
        kept = pending.state.kept
        for each in over_limit(kept, self._total_limit, pending.state.best):
            kept.remove(each)
            if self._distributed.rank != 0:
                continue
            if self._is_local:  # a large one takes long, and training may continue
                rest = self._storage.set_aside(each)
                remove = functools.partial(shutil.rmtree, rest, ignore_errors=True)
                self._deleting = self._thread.submit(lambda _, remove=remove: remove())  # type: ignore[misc]
                core_checkpoints._report_checkpoint_deleted(each, {})
            else:
                with HEART.patiently():
                    core_checkpoints.delete(each)

    # -------------------------------------------------------------------------------------------- load

    def load(self, uuid: str, *, trial_id: int) -> tuple[TrialState, dict[str, Any]]:
        """Read a checkpoint back; a collective.

        Args:
            uuid: Of the checkpoint; or the path of a folder.
            trial_id: This trial; on a cluster a checkpoint of another one is a warm start, and training counts from 0.

        Returns:
            Where training stands, and the state of the generators, to be set just before the next batch, when nothing
            is left to build.

        Raises:
            CheckpointError: it is missing or damaged, lacks this rank's part, or DeepSpeed refuses it.
        """
        with self._folder(uuid) as path:
            state = self._verified(path)
            if not self._is_local and state.trial_id != trial_id:
                self._warm_started(path, state)
                return TrialState(trial_id=trial_id), {}
            part = self._load(path, state)
            for owners, kind in ((self._callbacks, "callbacks"), (self.parts, "parts")):
                for name, own in part.get(kind, {}).items():
                    if name in owners:
                        owners[name].load_state_dict(own)
        if Path(uuid).is_absolute():  # another run's: those beside it are not this run's to delete
            state.kept, state.best = [], ""
        elif self._total_limit is not None and self._is_local:
            # Damaged checkpoints of the run directory count too, as its oldest, which go first.
            if uuid not in state.kept:
                state.kept.append(uuid)
            counted = self._storage.counted(state.kept) if self._distributed.rank == 0 else None
            state.kept = self._distributed.broadcast(counted)
        return state, part.get("rng_state", {})

    def take(self, uuid: str) -> TrialState:
        """Load a checkpoint's weights alone, whichever ranks wrote them; a collective."""
        with self._folder(uuid) as path:
            state = self._verified(path)
            self._load(path, state, weights_alone=True)
        return state

    @contextlib.contextmanager
    def _folder(self, uuid: str) -> Iterator[Path]:
        try:
            with self._context._core.checkpoint.restore_path(uuid) as path:
                yield Path(path)
        except CheckpointNotFound as error:
            raise CheckpointError(f"checkpoint {uuid} is not in checkpoint_storage: {error}") from error

    def fork(self, path: Path) -> None:
        """Start from the folder of a checkpoint of another run, see :meth:`load`; training counts from 0."""
        self._warm_started(path, self._verified(path))

    def _verified(self, path: Path) -> TrialState:
        """Where training stood at a checkpoint, all of whose files are what was written."""
        index, count, _ = share_of(path, self._distributed)
        damages = self._distributed.allgather(damage_of(path, share=(index, count)))
        if found := [damage for damage in damages if damage]:
            fix = "resume from another checkpoint, or copy its files again"
            raise CheckpointError(f"checkpoint {path.name} is damaged: {found[0]}\n  fix: {fix}")
        if self._distributed.rank == 0:
            warn_if_unverified(path, path.name)
        return read_state(path)

    def _warm_started(self, path: Path, state: TrialState) -> None:
        """Begin a new training with what another trial's checkpoint holds."""
        taken = "its weights alone, with a new optimizer and schedule"
        if self._warm_start == "all":
            taken = "its weights, optimizer, schedule and loss scale"
        self._load(path, state, weights_alone=self._warm_start != "all")
        if overrides(self._trial, "load"):
            taken = f"what {method_of(self._trial, 'load')} takes"
        whose = f"trial {state.trial_id}" if state.trial_id else "/".join(path.parent.parent.parts[-2:])
        from_where = f"batch {state.batches_trained} of {whose}, checkpoint {path.name}"
        self._note(f"warm start  {from_where}: {taken}; counting from batch 0")

    def _load(self, path: Path, state: TrialState, *, weights_alone: bool = False) -> dict[str, Any]:
        """Load the engines as the trial does, which may load only a part; else as they were, or their weights alone.

        Returns:
            The rest of this rank's part; for weights alone that of this rank, or of rank 0, whichever ranks wrote it.
        """
        if weights_alone:
            files = [path / PART.format(rank) for rank in (self._distributed.rank, 0)]
            file = next((file for file in files if file.is_file()), None)
            part = {} if file is None else read_data(file, map_location="cpu")
        else:
            part, elastic = self._own_parts.read(path, batch=state.batches_trained)
            if elastic:
                self._note(elastic)
        self._call_back("on_checkpoint_load_start", part)
        engines, models = self._engines, self._context.models
        if overrides(self._trial, "load"):
            with engines_load_only_data(models, path.name):
                self._trial.load(self._context, path)
        else:
            engines.load(path, weights_alone=weights_alone)
        if not weights_alone:
            built = part.get("built") or engines.built
            then = [engines.then.get(number, each) for number, each in enumerate(built)]
            for engine, before, now in zip(models, then, engines.built, strict=True):
                if line := put_into_effect(engine, before, now):
                    self._note(f"schedule    {line}")
        return part


# ------------------------------------------------------------------------------------------- beside training


def _available_bytes() -> int:
    """Memory that this machine, or this container, has left; what the system caches of files counts as left."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        numbers = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return min(available, limit - used + int(numbers["file"]))
    except (OSError, ValueError, KeyError):  # no limit, or cgroups of version 1
        return available


class Abandoned(Exception):
    """Raised in the thread: the run ends, and what is written is not needed."""


class WriterThread:
    """Does work in the order in which it is given; it takes part in no exchange between ranks.

    Each work has a thread, which waits for the one before: a daemon, so a rank that fails does not wait for a slow
    disk.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._is_abandoned = False

    def submit(self, work: Callable[[Callable[[], None]], T]) -> Future[T]:
        """Have work done; it gets a function to call now and then, which ends it where the run ends."""
        result: Future[T] = Future()
        arguments = (work, result, self._last)
        self._last = threading.Thread(target=self._run, args=arguments, name="checkpoint-writer", daemon=True)
        self._last.start()
        return result

    def abandon(self) -> None:
        """End what is being done, do nothing more, and wait for the thread: the interpreter must not end under it."""
        self._is_abandoned = True
        if self._last is not None:
            self._last.join(ENDS_WITHIN_S)

    def _run(self, work: Callable[..., Any], result: Future[Any], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if (
            sys.platform == "linux"
        ):  # a thread has a priority of its own: it takes the time that training leaves
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._beat()
            result.set_result(work(self._beat))
        except BaseException as error:  # raised where the result is taken
            result.set_exception(error)

    def _beat(self) -> None:
        if self._is_abandoned:
            raise Abandoned
