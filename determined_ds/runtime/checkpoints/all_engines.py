"""The engines of a trial in a checkpoint: written as slices by all ranks, and read back by any.

    model<I>/index.json              which bytes are which slice of which tensor
             rank<R>.safetensors     the slices of rank R
             settings_stage<S>.pt    settings of the optimizer, schedule, loss scale, counts; of pipeline stage S
             own_states_rank<R>.pt   an optimizer's states that cannot be cut: for the same ranks alone

An engine that cannot be cut in this way is written by DeepSpeed, see
:func:`~determined_ds.runtime.checkpoints.slices.own_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from determined.pytorch import deepspeed as det_ds

from determined_ds.checkpoints.index import INDEX_NAME, Described, index_of, write_index
from determined_ds.checkpoints.index import Written as Entry
from determined_ds.checkpoints.reader import StoredEngine, layout_of, stored_engine, stored_weights
from determined_ds.errors import CheckpointError
from determined_ds.protocol.heartbeat import HEART
from determined_ds.runtime.checkpoints.besides_tensors import built_then, put_settings, settings_of
from determined_ds.runtime.checkpoints.built import Record
from determined_ds.runtime.checkpoints.contents import another_model, read_data
from determined_ds.runtime.checkpoints.fill_engine import Filling, check_optimizer, misfits
from determined_ds.runtime.checkpoints.held import state_of
from determined_ds.runtime.checkpoints.shards import (
    buffer_bytes,
    described,
    serialized,
    staged,
    write_files,
    write_slices,
)
from determined_ds.runtime.checkpoints.slices import EngineSlices, Slice, own_layout, owners_of
from determined_ds.runtime.checkpoints.state_bytes import base_optimizer
from determined_ds.runtime.checkpoints.weights import read_own_weights
from determined_ds.trial.author import method_of
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.expert_parallel import expert_degree_of
from determined_ds.trial.ordered_module import PlannedModule
from determined_ds.trial.tensor_parallel import degree_of

MOST_NAMED = 3
STATES_OF_ADAM_BYTES = 8  # a parameter


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What this rank writes of an engine.

    Args:
        folder: ``model<I>``.
        shard: The name of its file of slices.
        slices: Live, or copies in host memory.
        description: The engine's tensors on this rank.
        files: Name -> content of other files.
    """

    folder: str
    shard: str
    slices: Sequence[Slice]
    description: Described
    files: dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What this rank wrote.

    Args:
        entries: Engine's folder -> the slices in this rank's file.
        descriptions: Engine's folder -> its tensors on this rank.
        fingerprints: Relative name of a file -> size and checksum, of those that are known.
        uploaded: Whether those files are in another storage, too.
    """

    entries: dict[str, tuple[Entry, ...]]
    descriptions: dict[str, Described]
    fingerprints: dict[str, dict[str, Any]]
    uploaded: bool = False


NOTHING = Written(entries={}, descriptions={}, fingerprints={})


class Engines:
    """The engines of a trial; made by all ranks at once.

    Args:
        trial: Whose ``weight_names`` gives more names to parameters.
        context: With the engines and the ranks.
        built: What each engine was built with.

    Attributes:
        own_layouts: Why each engine is written by DeepSpeed; "" for one that is not. The same on all ranks.
        buffers: Host memory that :meth:`save` copies the engines into; None: it writes them.
        reset_optimizer: Whether :meth:`load` leaves the optimizers as they are built.
        then: What each engine of the checkpoint that was loaded last was built with, as this trial's are.
    """

    then: list[Record] | None = None

    def __init__(self, trial: Any, context: Any, built: Sequence[Record]) -> None:
        self._trial = trial
        self._context = context
        self._built = built
        self._written = NOTHING
        self._copies: list[Taken] = []
        self._has_written = False
        self.buffers: list[torch.Tensor] | None = None
        self.reset_optimizer = False
        # A stage that has no part of a layer does not see what is against it: what one rank finds, all go by.
        reasons = context.distributed.allgather([own_layout(engine) for engine in context.models])
        self.own_layouts = [next(filter(None, found), "") for found in zip(*reasons, strict=True)]

    def _slices(self, engine: Any) -> EngineSlices:
        name = getattr(self._trial, "weight_names", None)
        return EngineSlices(engine, None if name is None else name(engine.module))

    # ------------------------------------------------------------------------------------- written

    def save(self, path: Path) -> None:
        """Write the engines, or copy what this rank writes of them; a collective. :meth:`collect` is to follow."""
        self._save_own_layouts(path)
        self._has_written = True
        if self.buffers is None:
            self._written = self.write(path, self.take(), HEART.beat)
        else:
            self._copies = copied(self.take(), self.buffers)

    def collect(self) -> tuple[list[Taken], Written]:
        """Of the last :meth:`save`: what is copied and to be written, and what is written."""
        found = self._copies, self._written
        self._copies, self._written = [], NOTHING
        return found

    def copy_bytes(self) -> int:
        """Bytes that this rank copies of the engines; states that do not exist yet are taken for Adam's."""
        total = 0
        for engine, reason in zip(self._context.models, self.own_layouts, strict=True):
            if reason:
                continue
            own = self._slices(engine)
            slices = own.written()
            unborn = sum(lies.count for held in own.held if not state_of(engine, held) for lies in held.lies)
            unborn_bytes = STATES_OF_ADAM_BYTES * unborn // (1 if own.is_split else own.replicas)
            total += buffer_bytes(slices, sum(each.num_bytes for each in slices) + unborn_bytes)
        return total

    def own_layout(self) -> str:
        """Why only the ranks that wrote the engines last, under their strategy, can read them; "" where others can."""
        if reason := next(filter(None, self.own_layouts), ""):
            return reason
        method = "load" if overrides(self._trial, "load") else "save" if not self._has_written else ""
        return f"{method_of(self._trial, method)} decides itself what is written and read" if method else ""

    def load(self, path: Path) -> None:
        """Fill the engines from a checkpoint of any layout; a collective."""
        if self.are_indexed(path):
            self.then = self.read(path, path.name, reset_optimizer=self.reset_optimizer)
            return
        self._check_own_layouts(path)
        self.then = None
        for number, engine in enumerate(self._context.models):
            engine.load_checkpoint(str(path), tag=f"model{number}")

    def _save_own_layouts(self, path: Path) -> None:
        """Have DeepSpeed write those engines that cannot be cut into slices; a collective."""
        for number, engine in enumerate(self._context.models):
            if self.own_layouts[number]:
                engine.save_checkpoint(str(path), tag=f"model{number}")

    def take(self) -> list[Taken]:
        """What this rank writes of the other engines, as it is in memory."""
        return [
            self._taken(number, engine)
            for number, engine in enumerate(self._context.models)
            if not self.own_layouts[number]
        ]

    def _taken(self, number: int, engine: Any) -> Taken:
        own, rank = self._slices(engine), self._context.distributed.rank
        files: dict[str, bytes] = {}
        if own.is_first:
            settings = settings_of(own, self._built[number])
            stage = getattr(engine, "stage_id", 0)
            files[f"settings_stage{stage}.pt"] = serialized({**settings, "layout": self._layout(own)})
        if others := own.others():
            files[f"own_states_rank{rank}.pt"] = serialized(others)
        return Taken(
            folder=f"model{number}",
            shard=f"rank{rank}.safetensors",
            slices=own.written(),
            description=described(own),
            files=files,
        )

    def _layout(self, own: EngineSlices) -> dict[str, Any]:
        """What must be the same for a resume that changes nothing at all."""
        engine = own.engine
        return {
            "ranks": self._context.distributed.size,
            "replicas": own.replicas,
            "zero_stage": engine.zero_optimization_stage(),
            "kind": type(engine.optimizer).__name__,
            "optimizer": type(base_optimizer(engine)).__name__ if engine.optimizer is not None else "",
            **({"owners": owners} if (owners := owners_of(engine)) else {}),
            **({"model_parallel_size": degree_of(engine)} if degree_of(engine) > 1 else {}),
            **({"expert_parallel_size": experts} if (experts := expert_degree_of(engine)) else {}),
        }

    @staticmethod
    def write(path: Path, taken: Sequence[Taken], beat: Callable[[], None], alone: bool = False) -> Written:
        """Write this rank's files; not a collective. With :func:`copied` slices also beside training, ``alone``."""
        entries, descriptions = {}, {}
        fingerprints: dict[str, dict[str, Any]] = {}
        for each in taken:
            folder = path / each.folder
            folder.mkdir(parents=True, exist_ok=True)
            written, fingerprint = write_slices(folder / each.shard, each.slices, beat, alone=alone)
            marks = write_files(folder, each.files)
            entries[each.folder] = tuple(written)
            descriptions[each.folder] = each.description
            fingerprints[f"{each.folder}/{each.shard}"] = fingerprint
            fingerprints |= {f"{each.folder}/{name}": mark for name, mark in marks.items()}
        return Written(entries=entries, descriptions=descriptions, fingerprints=fingerprints)

    def write_indexes(self, path: Path, written: Written) -> None:
        """Have rank 0 write the index of each engine; a collective."""
        everyone = self._context.distributed.gather(written)
        for folder in written.entries if everyone is not None else ():
            ranks = [each.descriptions[folder] for each in everyone]
            entries = [entry for each in everyone for entry in each.entries[folder]]
            write_index(path / folder, index_of(ranks, entries))
        self._context.distributed.allgather(None)  # callbacks of every rank see it

    # ------------------------------------------------------------------------------------- read

    @staticmethod
    def are_indexed(path: Path) -> bool:
        """Whether any engine in a checkpoint was written as slices."""
        return any(path.glob(f"model*/{INDEX_NAME}"))

    def read(self, path: Path, uuid: str, *, reset_optimizer: bool = False) -> list[Record] | None:
        """Fill the engines; a collective.

        Args:
            path: The checkpoint's folder.
            uuid: Of the checkpoint, for messages.
            reset_optimizer: Whether the optimizers begin anew.

        Returns:
            What each engine was built with when it was written, as this trial's are; None where it does not say.

        Raises:
            CheckpointError: it does not fit, or lacks a file.
            ConfigError: it is of another model.
        """
        found = self._stored(path, uuid, settings=True)
        for engine, stored in zip(self._context.models, found, strict=True):  # before any is filled
            if stored is not None and not reset_optimizer:
                own = self._slices(engine)
                exact = stored.settings.get("layout") == self._layout(own)
                check_optimizer(own, stored, uuid, exact=exact)
        then: list[Record] | None = list(self._built)
        for number, (engine, stored) in enumerate(zip(self._context.models, found, strict=True)):
            if stored is None:
                engine.load_checkpoint(str(path), tag=f"model{number}")
                continue
            own = self._slices(engine)
            settings = stored.settings
            exact = settings.get("layout") == self._layout(own)
            Filling(own, stored, exact=exact).fill(optimizer=not reset_optimizer)
            put_settings(own, settings, optimizer=not reset_optimizer)
            if exact and not reset_optimizer:
                self._read_own_states(own, path / f"model{number}")
            if settings["built"] is None:
                then = None
            elif then is not None and not reset_optimizer:
                then[number] = built_then(own, settings, self._built[number])
        return then

    def read_weights(self, path: Path, uuid: str) -> None:
        """Fill the engines with the weights alone; optimizers and schedules stay as built. A collective."""
        engines = zip(self._context.models, self._stored(path, uuid, settings=False), strict=True)
        for number, (engine, stored) in enumerate(engines):
            if stored is None:
                read_own_weights(engine, path, number)
            else:
                Filling(self._slices(engine), stored, exact=False).fill(optimizer=False)

    def _stored(self, path: Path, uuid: str, *, settings: bool) -> list[StoredEngine | None]:
        """Each engine in a checkpoint, checked against those here: all ranks refuse alike.

        With its ``settings``, or its weights alone, which may be those of an engine that DeepSpeed wrote.
        """
        there, here = sum(1 for found in path.glob("model*") if found.is_dir()), len(self._context.models)
        if there != here:
            words = f"it holds {there} engine{'s' * (there != 1)}, and this trial has {here}"
            raise another_model(uuid, words)
        found, failure = [], ""
        try:
            found = [  # None: DeepSpeed is to load it
                None if reason else (stored_engine if settings else stored_weights)(path / f"model{number}")
                for number, reason in enumerate(self.own_layouts)
            ]
            for stored in found if settings else ():
                assert stored is None or stored.settings  # read now: a file may be missing or cut
        except CheckpointError as error:
            failure = str(error)
        if failures := [each for each in self._context.distributed.allgather(failure) if each]:
            raise CheckpointError(f"checkpoint {uuid}: {failures[0]}")
        for number, (engine, stored) in enumerate(zip(self._context.models, found, strict=True)):
            if stored is not None and (reasons := self._misfits(engine, stored)):
                where = f"engine {number}: " if here > 1 else ""
                more = [f"and {len(reasons) - MOST_NAMED} more"] if len(reasons) > MOST_NAMED else []
                raise another_model(uuid, where + "; ".join([*reasons[:MOST_NAMED], *more]))
        return found

    def _check_own_layouts(self, path: Path) -> None:
        """Refuse files of DeepSpeed's that these ranks did not write under this strategy.

        DeepSpeed itself would load the weights of some layouts, and leave out the optimizer.
        """
        for number, engine in enumerate(self._context.models):
            there = layout_of(path / f"model{number}")
            stage = engine.zero_optimization_stage()
            replicas = self._slices(engine).replicas if stage else 1
            here = (1 if stage == 2 else min(stage, 3), replicas, getattr(engine, "num_stages", 1))
            if isinstance(engine, DDPEngine):
                here = ("ddp", 1, 1)
            # The names of a planned pipeline's files are those of any schedule.
            is_known = self.own_layouts[number] or not isinstance(engine.module, PlannedModule)
            if here != there or not is_known:
                raise CheckpointError(
                    f"checkpoint {path.name}: DeepSpeed wrote model{number} in its own layout, which only the ranks "
                    "and the strategy that wrote it can read\n  fix: resume it with those; or start from its weights, "
                    "by searcher.source_checkpoint_uuid with fit.warm_start: weights"
                )

    def _misfits(self, engine: Any, stored: StoredEngine) -> list[str]:
        everyone = self._context.distributed.allgather(misfits(self._slices(engine), stored))
        reasons = list(dict.fromkeys(reason for own, _ in everyone for reason in own))
        taken = {name for _, names in everyone for name in names}
        surplus = [name for name in stored.index.tensors if name not in taken]
        shapes = stored.index.tensors
        return [*reasons, *(f"{name} {shapes[name].shape} is not in this model" for name in surplus)]

    def _read_own_states(self, own: EngineSlices, folder: Path) -> None:
        file = folder / f"own_states_rank{self._context.distributed.rank}.pt"
        if not file.is_file():
            return
        base = base_optimizer(own.engine)
        for number, states in read_data(file, map_location="cpu").items():
            held = own.held[number]
            device = held.tensor.device
            base.state.setdefault(held.tensor, {}).update(
                {
                    key: value.to(device) if isinstance(value, torch.Tensor) else value
                    for key, value in states.items()
                }
            )


def overrides(trial: Any, method: str) -> bool:
    """Whether a trial has its own ``save`` or ``load``."""
    own = getattr(type(trial), method)
    return own not in (getattr(det_ds.DeepSpeedTrial, method), getattr(ReconciledTrial, method))


def copied(taken: Sequence[Taken], buffers: list[torch.Tensor]) -> list[Taken]:
    """What is taken, with copies of the slices in host memory.

    Args:
        taken: Of each engine.
        buffers: Host memory of an earlier call, which is taken again; filled with what is used now.
    """
    copies = []
    for number, each in enumerate(taken):
        slices, buffer = staged(each.slices, buffers[number] if number < len(buffers) else None)
        buffers[number : number + 1] = [buffer]
        copies.append(replace(each, slices=slices))
    return copies
