"""How a checkpoint is written: at once, or from copies while training continues.

1. The engines are copied to host memory, and the small parts of this rank as bytes.
2. A thread of each rank writes its files into the folder, which is not a checkpoint yet, and computes their checksums.
3. Ranks learn with the exchange that asks for stop requests that all have written.
4. They seal it together: indexes, manifest, and the new name, or the upload and the report to the master.

Written at once, 2 follows 1 without copies, and 4 follows immediately. The thread takes part in no exchange.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import determined as det
import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.exhausted import exhausted
from determined_ds.protocol.heartbeat import HEART
from determined_ds.runtime.checkpoints.all_engines import Engines, Written, overrides
from determined_ds.runtime.checkpoints.aside import COPIES, is_aside
from determined_ds.runtime.checkpoints.built import records_of, schedule_of
from determined_ds.runtime.checkpoints.folders import check_room, seal_folder
from determined_ds.runtime.checkpoints.parts import RankParts
from determined_ds.runtime.checkpoints.rank_files import check_part, save_part, write_rank_files
from determined_ds.runtime.checkpoints.trial_state import TrialState, state_files
from determined_ds.runtime.checkpoints.upload_process import all_but, upload
from determined_ds.runtime.checkpoints.writer_thread import WriterThread
from determined_ds.runtime.data.seeds import rng_state
from determined_ds.runtime.local_core import AtomicStorage
from determined_ds.runtime.master.ending import exit_code_of
from determined_ds.runtime.scripts.given_run import cluster_info

# How long a thread may take to end where nothing more is to be written.
ENDS_WITHIN_S = 10.0


class Stateful(Protocol):
    """Something whose state a checkpoint holds."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> None: ...


@dataclass(kw_only=True)
class Pending:
    """A checkpoint that is not sealed yet.

    Args:
        uuid: Of the checkpoint.
        path: Its folder for now.
        closing: Puts it into storage.
        metadata: What ``metadata.json`` holds.
        batch: Batches trained.
        state: Where training stands, by now further than this checkpoint.
        best: Uuid of the best checkpoint, this one included.
        began_s: By ``time.monotonic``.
        writing: What the thread does for it; None where it is written at once.
    """

    uuid: str
    path: Path
    closing: contextlib.ExitStack
    metadata: dict[str, Any]
    batch: int
    state: TrialState
    best: str
    began_s: float = field(default_factory=time.monotonic)
    writing: Future[Written] | None = None


class CheckpointWriter:
    """Writes the checkpoints of a run.

    Args:
        trial: Its ``save`` writes the engines.
        context: Its core context stores the files, here or on the cluster.
        callbacks: Name -> callback; their state is kept.
        parts: Name -> what else has a state on each rank.
        total_limit: Checkpoints to keep at most, always with the best and the newest; None: all.
        note: Shows a line to the user.
    """

    def __init__(
        self,
        trial: Any,
        context: Any,
        callbacks: dict[str, Any],
        parts: dict[str, Stateful],
        total_limit: int | None = None,
        *,
        note: Callable[[str], None] = print,
    ) -> None:
        self._trial = trial
        self._context = context
        self._distributed = context.distributed
        self._callbacks = callbacks
        self._parts = parts
        self._total_limit = total_limit
        self._note = note
        self._built = records_of(context.models)
        self._own_parts = RankParts(trial, context, callbacks)
        self._engines = context.engine_files = Engines(trial, context, self._built)
        self._checked_part = False
        self._thread = WriterThread()
        self._pending: list[Pending] = []  # in the order of their batches
        self._deleting: list[Future[None]] = []
        self._buffers: list[list[torch.Tensor]] = []  # none: every checkpoint is written at once

    def add_part(self, name: str, part: Stateful) -> None:
        """Keep another state on each rank, before anything is saved or loaded."""
        self._parts[name] = part

    @property
    def _storage(self) -> Any:
        return getattr(self._context._core.checkpoint, "_storage_manager", None)

    @property
    def _is_local(self) -> bool:
        return isinstance(self._storage, AtomicStorage)

    def _call_back(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for callback in self._callbacks.values():
            getattr(callback, hook)(*args, **kwargs)

    # -------------------------------------------------------------------------------------------- at once or not

    def prepare(self, asynchronous: bool | None) -> None:
        """Decide, before training, whether checkpoints are written while it continues; a collective.

        Args:
            asynchronous: As stated; None: where a rank writes much, the trial has no ``save`` of its own, and memory
                suffices.

        Raises:
            ConfigError: it is stated, and the machine has not the memory.
        """
        if is_aside(asynchronous, self._trial, self._engines, self._distributed, self._note):
            self._buffers = [[] for _ in range(COPIES)]

    @property
    def batch_in_writing(self) -> int | None:
        """Batches trained at the oldest checkpoint that is not sealed yet; None where there is none."""
        return self._pending[0].batch if self._pending else None

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its files of the oldest checkpoint that is not sealed yet."""
        return (
            bool(self._pending) and self._pending[0].writing is not None and self._pending[0].writing.done()
        )

    @property
    def unsealed(self) -> list[str]:
        """Uuids of checkpoints that are not sealed yet."""
        return [each.uuid for each in self._pending]

    # -------------------------------------------------------------------------------------------- save

    def save(self, state: TrialState, *, best: bool = False, waits: bool = True) -> str:
        """Write a checkpoint; a collective.

        Args:
            state: Where training stands; the new checkpoint is added to it.
            best: The validation before it was the best so far.
            waits: Return when it is complete. Otherwise it may be written while training continues: :meth:`seal_oldest`
                or :meth:`finish` is to be called.

        Returns:
            Its uuid.

        Raises:
            CheckpointError: it does not fit on the disk; or an earlier one could not be written.
        """
        aside = bool(self._buffers) and not waits
        while len(self._pending) >= (COPIES if aside else 1):
            if not self.is_written:
                self._note(
                    f"waiting     for the checkpoint of batch {self._pending[0].batch}, which is still written"
                )
            self.seal_oldest()
        if self._is_local:
            self._check_room()
        state.last_checkpoint = state.batches_trained
        pending = self._begin(state, best=best)
        self._engines.buffers = self._free_buffer() if aside else None
        work = self._take(pending, at_once=not aside)
        if aside:
            pending.writing = self._thread.submit(work)
            self._pending.append(pending)
        else:
            self._seal(pending, work(HEART.beat))
        return pending.uuid

    def _check_room(self) -> None:
        """Refuse a checkpoint that does not fit; one that is being written is completed first, and is not lost."""
        try:
            check_room(self._context, self._storage.folder)
        except CheckpointError:  # on all ranks
            if not self._pending:
                raise
            self.finish()
            check_room(self._context, self._storage.folder)  # a limit may have deleted one

    def _free_buffer(self) -> list[torch.Tensor]:
        """Host memory that no checkpoint is written from: at most one is, which was copied last."""
        self._buffers.reverse()
        return self._buffers[0]

    def _begin(self, state: TrialState, *, best: bool) -> Pending:
        metadata = {
            "determined_version": det.__version__,
            "steps_completed": state.batches_trained,
            "framework": f"torch-{torch.__version__}",
            "format": "pickle",
        }
        closing = contextlib.ExitStack()
        store = self._context._core.checkpoint.store_path(metadata, shard=True)
        path, uuid = closing.enter_context(store)
        path.mkdir(parents=True, exist_ok=True)
        state.kept.append(uuid)
        state.best = uuid if best else state.best
        return Pending(
            uuid=str(uuid),
            path=Path(path),
            closing=closing,
            metadata=metadata,
            batch=state.batches_trained,
            state=state,
            best=state.best,
        )

    def _take(self, pending: Pending, *, at_once: bool) -> Callable[[Callable[[], None]], Written]:
        """Take what this rank writes, and write what only this thread can; a collective.

        Returns:
            What writes the rest.
        """
        checkpoint = {
            "callbacks": {name: callback.state_dict() for name, callback in self._callbacks.items()},
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "rng_state": rng_state(self._context.device),
            "built": self._built,
            "place": self._own_parts.written(),
        }
        self._call_back("on_checkpoint_save_start", checkpoint)
        name = f"det_state_dict_rank{self._distributed.rank}.pth"
        own: Any = pending.path / name if at_once else io.BytesIO()
        save_part(checkpoint, own, self._callbacks)
        HEART.beat()
        if not self._checked_part:  # at the first checkpoint, not at the first resume
            self._checked_part = True
            check_part(own, checkpoint, self._callbacks)
        if overrides(self._trial, "save"):
            self._trial.save(self._context, pending.path)
        else:
            self._engines.save(pending.path)
        taken, written = self._engines.collect()
        files = {} if at_once else {name: own.getvalue()}
        if self._distributed.rank == 0:
            files |= {file: text.encode() for file, text in self._state_files(pending.state).items()}
        # Off-cluster the context directory is at hand.
        with_code = self._distributed.rank == 0 and not self._is_local
        send = None if at_once else self._upload_of(pending)
        return functools.partial(write_rank_files, pending.path, written, taken, files, with_code, send)

    def _upload_of(self, pending: Pending) -> Callable[[Sequence[str], Callable[[], None]], None] | None:
        """What uploads files of a checkpoint while training continues; None where they are at their place."""
        info = cluster_info()
        if info is None or info.task_type != "TRIAL" or self._storage.store_path_is_direct_access():
            return None
        config = info.trial._config["checkpoint_storage"]
        return functools.partial(upload, config, pending.path, pending.uuid)

    def _state_files(self, state: TrialState) -> dict[str, str]:
        by = self._own_parts.written_by(self._engines.own_layout(), self._parts.get("data"))
        if getattr(self._trial, "reads_length", False):  # then a longer training changes its schedule
            by["schedule_by_length"] = schedule_of(self._context.models)
        return state_files(self._trial, self._context, state, by)

    # -------------------------------------------------------------------------------------------- seal

    def seal_oldest(self) -> None:
        """Complete the oldest checkpoint that is not sealed yet, once every rank has written it; a collective.

        Raises:
            CheckpointError: on all ranks, where one could not write.
        """
        pending = self._pending[0]
        assert pending.writing is not None
        with HEART.patiently():  # a storage may be slow
            error = pending.writing.exception()
            failures = self._distributed.allgather(None if error is None else self._failure(error))
        if any(failures):
            self._give_up(pending, failures, error)
        self._seal(pending, pending.writing.result())
        self._pending.remove(pending)

    def finish(self) -> None:
        """Complete every checkpoint that is not sealed yet; a collective. Raises as :meth:`seal_oldest`."""
        while self._pending:
            self.seal_oldest()
        while self._deleting:
            with HEART.patiently():
                self._deleting.pop().result()

    def abandon(self) -> None:
        """The run ends without :meth:`finish`, or has nothing left to write: end what this rank writes."""
        self._thread.abandon()

    def _failure(self, error: BaseException) -> tuple[str, int]:
        words = exhausted(error, self._context._run_dir.path) or f"{type(error).__name__}: {error}"
        return words.removeprefix("error: "), exit_code_of(error)

    def _give_up(self, pending: Pending, failures: list[Any], own: BaseException | None) -> None:
        """Remove what is not sealed, and raise why a checkpoint could not be written; a collective."""
        self.abandon()
        wait([each.writing for each in self._pending if each.writing is not None], timeout=ENDS_WITHIN_S)
        self._distributed.allgather(None)
        for each in self._pending:
            if self._distributed.local_rank == 0:
                shutil.rmtree(each.path, ignore_errors=True)
            if self._distributed.rank == 0 and not self._is_local:
                with contextlib.suppress(Exception):  # it may be what is out of reach
                    self._storage.delete(each.uuid, ["**/*"])
        rank, (words, exit_code) = next((rank, each) for rank, each in enumerate(failures) if each)
        sealed = [uuid for uuid in pending.state.kept if uuid not in self.unsealed]
        last = f"the last one is {sealed[-1]}" if sealed else "there is none before it"
        fix = "" if "\n  fix: " in words else "\n  fix: remove the cause, then add --resume"
        failed = CheckpointError(
            f"the checkpoint of batch {pending.batch} could not be written, and {last}: rank {rank}: {words}{fix}"
        )
        failed.exit_code = exit_code
        self._pending = []
        raise failed from own

    def _seal(self, pending: Pending, written: Written) -> None:
        """Make the files that all ranks have written a checkpoint; a collective."""
        path, uuid = pending.path, pending.uuid
        self._engines.write_indexes(path, written)
        HEART.beat()
        for callback in self._callbacks.values():
            callback.on_checkpoint_end(str(path))
            callback.on_checkpoint_write_end(str(path))
        seal_folder(path, pending.metadata, written.fingerprints, self._distributed)
        there = self._distributed.allgather(list(written.fingerprints) if written.uploaded else [])
        with HEART.patiently(), all_but(self._storage, {name for names in there for name in names}):
            pending.closing.close()
        took = "" if pending.writing is None else f"  written in {time.monotonic() - pending.began_s:.1f} s"
        self._note(f"checkpoint  batch {pending.batch}  {uuid}{took}")
        self._call_back("on_checkpoint_upload_end", uuid=uuid)
        self._prune(pending)

    def _prune(self, pending: Pending) -> None:
        """Delete the oldest checkpoints over the limit, never the best nor the newest that is sealed."""
        if self._total_limit is None:
            return
        kept = pending.state.kept
        sealed = kept[: kept.index(pending.uuid) + 1]
        spare = [uuid for uuid in sealed[:-1] if uuid != pending.best]
        for uuid in spare[: max(0, len(sealed) - self._total_limit)]:
            kept.remove(uuid)
            if self._distributed.rank == 0:
                with HEART.patiently():
                    self._delete(uuid, aside=pending.writing is not None)

    def _delete(self, uuid: str, *, aside: bool) -> None:
        """Delete a checkpoint; a large one takes long, and the thread does that where training is to continue."""
        checkpoints = self._context._core.checkpoint
        if not (aside and self._is_local):
            checkpoints.delete(uuid)
            return
        folder = self._storage.set_aside(uuid)
        self._deleting.append(self._thread.submit(lambda _: shutil.rmtree(folder, ignore_errors=True)))
        checkpoints._report_checkpoint_deleted(uuid, {})
