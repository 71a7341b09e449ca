"""The engines of a trial in a checkpoint: written as slices by all ranks, and read back by any.

    model<I>/index.json              which bytes are which slice of which tensor
             rank<R>.safetensors     the slices of rank R
             settings_stage<S>.pt    settings of the optimizer, schedule, loss scale, counts; of pipeline stage S
             own_states_rank<R>.pt   an optimizer's states that cannot be cut: for the same ranks alone

An engine that cannot be cut in this way is written by DeepSpeed, see
:func:`~determined_ds.checkpoints.engine_slices.own_layout`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from determined.pytorch import deepspeed as det_ds

from determined_ds.callbacks import EMA
from determined_ds.checkpoints.engine_slices import EngineSlices, Slice, own_layout, owners_of
from determined_ds.checkpoints.fill import Filling
from determined_ds.checkpoints.index import (
    INDEX_NAME,
    Described,
    Entry,
    Piece,
    average_state,
    index_of,
    write_index,
)
from determined_ds.checkpoints.reader import DTYPES, StoredEngine, layout_of, stored_engine
from determined_ds.checkpoints.safe_load import another_model, only_data, read_data, serialized
from determined_ds.checkpoints.settings import Record, put_settings, settings_of, some_of
from determined_ds.checkpoints.shard_file import Streamed, write_shard
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.memory import base_optimizer
from determined_ds.trial.author import method_of
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.expert_parallel import expert_degree_of
from determined_ds.trial.tensor_parallel import degree_of

STATES_OF_ADAM_BYTES = 8  # a parameter
CHUNK_BYTES = 2**23


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What this rank writes of an engine."""

    folder: str  # model<I>
    shard: str  # the name of its file of slices
    slices: Sequence[Slice]  # live, or copies in host memory
    description: Described
    files: Mapping[str, bytes | memoryview]  # name -> content of other files


@dataclass(frozen=True, kw_only=True)
class Written:
    """What this rank wrote."""

    entries: Mapping[str, tuple[Entry, ...]] = field(
        default_factory=dict
    )  # of each engine's folder, its slices
    descriptions: Mapping[str, Described] = field(default_factory=dict)
    fingerprints: Mapping[str, dict[str, Any]] = field(
        default_factory=dict
    )  # file -> size and checksum, where known
    uploaded: bool = False  # those files are in another storage, too


class Engines:
    """The engines of a trial; made by all ranks at once."""

    def __init__(
        self, trial: Any, context: Any, built: Sequence[Record], averages: Mapping[str, EMA] | None = None
    ) -> None:
        self._trial = trial
        self._averages = averages or {}
        self._context = context
        self._built = built
        self._taken: list[Taken] = []
        self._written = Written()
        self._has_written = False
        self.buffers: list[torch.Tensor] | None = None
        self.reset_optimizer = False
        self.then: list[Record] | None = None
        # A stage that has no part of a layer does not see what is against it: what one rank finds, all go by.
        reasons = context.distributed.allgather([own_layout(engine) for engine in context.models])
        self.own_layouts = [next(filter(None, found), "") for found in zip(*reasons, strict=True)]
        types = [
            f"{whole.kind} {name} is of {whole.tensor.dtype}, which no checkpoint can hold\n  fix: convert it, or "
            "register a buffer with persistent=False where it need not be kept"
            for _, own in self._cut()
            for name, whole in own.wholes.items()
            if whole.tensor.dtype not in DTYPES
        ]
        if found := [each for own in context.distributed.allgather(types) for each in own]:
            raise CheckpointError(found[0])

    def _cut(self) -> Iterator[tuple[int, EngineSlices]]:
        """The engines that are written as slices, by number."""
        for number, engine in enumerate(self._context.models):
            if not self.own_layouts[number]:
                yield number, self._slices(engine)

    def _slices(self, engine: Any) -> EngineSlices:
        name = getattr(self._trial, "weight_names", None)
        return EngineSlices(engine, None if name is None else name(engine.module))

    def _averaged(self, own: EngineSlices, number: int) -> Iterator[Slice]:
        """This rank's parts of the averages of an engine."""
        for name, average in self._averages.items():
            for parameter, start, part in average.parts(number):
                yield from own.in_whole(parameter, average_state(name), start, part)

    def own_layout(self) -> str:
        """Why only the ranks that wrote the engines last, under their strategy, can read them; "" where others can."""
        if reason := next(filter(None, self.own_layouts), ""):
            return reason
        method = "load" if overrides(self._trial, "load") else "save" if not self._has_written else ""
        return f"{method_of(self._trial, method)} decides itself what is written and read" if method else ""

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

    # ------------------------------------------------------------------------------------- written

    def save(self, path: Path) -> None:
        """Take what this rank writes of the engines, as copies where there are buffers; a collective.

        :meth:`collect` is to follow. What DeepSpeed writes by itself is written now.
        """
        for number, engine in enumerate(self._context.models):
            if self.own_layouts[number]:
                engine.save_checkpoint(str(path), tag=f"model{number}")
        self._has_written = True
        self._taken = self.take()
        if self.buffers is None:  # before a trial's own save continues, which may read or change them
            self._written = write_engines(path, self._taken, HEART.beat)
            self._taken = []
            return
        for number, each in enumerate(self._taken):
            slices, buffer = staged(each.slices, self.buffers[number] if number < len(self.buffers) else None)
            self.buffers[number : number + 1] = [buffer]
            self._taken[number] = replace(each, slices=slices)

    def collect(self) -> tuple[list[Taken], Written]:
        """Of the last :meth:`save`: what is copied and to be written, and what is written."""
        found = self._taken, self._written
        self._taken, self._written = [], Written()
        return found

    def copy_bytes(self) -> int:
        """Bytes of host memory for a copy of the engines; states that do not exist yet are taken for Adam's."""
        total = 0
        for number, own in self._cut():
            slices = own.written(self._averaged(own, number))
            unborn = sum(lies.count for held in own.held if not own.state_of(held) for lies in held.lies)
            unborn_bytes = STATES_OF_ADAM_BYTES * unborn // (1 if own.is_split else own.replicas)
            count = sum(each.num_bytes for each in slices) + unborn_bytes
            is_pinned = any(each.tensor.is_cuda for each in slices)  # torch pins powers of two
            total += 1 << (count - 1).bit_length() if is_pinned else count
        return total

    def take(self) -> list[Taken]:
        """What this rank writes of the engines that are cut, as it is in memory."""
        found, rank = [], self._context.distributed.rank
        for number, own in self._cut():
            files: dict[str, Any] = {}
            if own.is_first:
                settings = {**settings_of(own, self._built[number]), "layout": self._layout(own)}
                files[f"settings_stage{getattr(own.engine, 'stage_id', 0)}.pt"] = settings
            if others := own.others():
                files[f"own_states_rank{rank}.pt"] = others
            found.append(
                Taken(
                    folder=f"model{number}",
                    shard=f"rank{rank}.safetensors",
                    slices=own.written(self._averaged(own, number)),
                    description=own.described(),
                    files={name: serialized(content).getbuffer() for name, content in files.items()},
                )
            )
        return found

    def write_indexes(self, path: Path, written: Written) -> None:
        """Have rank 0 write the index of each engine; a collective."""
        everyone = self._context.distributed.gather(written)
        for folder in written.entries if everyone is not None else ():
            ranks = [each.descriptions[folder] for each in everyone]
            entries = [entry for each in everyone for entry in each.entries[folder]]
            write_index(path / folder, index_of(ranks, entries))
        self._context.distributed.allgather(None)  # callbacks of every rank see it

    # ------------------------------------------------------------------------------------- read

    def load(self, path: Path) -> None:
        """Fill the engines from a checkpoint of any layout; a collective."""
        if not are_indexed(path):
            self._check_own_layouts(path)
            self.then = None
            for number, engine in enumerate(self._context.models):
                _load_by_deepspeed(self._context, engine, path, number)
            return
        with_optimizer, then = not self.reset_optimizer, list(self._built)
        fillings = []
        for number, stored in enumerate(
            self._stored(path, settings=True)
        ):  # all are checked before any is filled
            if stored is None:
                continue
            own = self._slices(self._context.models[number])
            exact, filling = stored.settings.get("layout") == self._layout(own), Filling(own, stored)
            if with_optimizer:
                filling.check_optimizer(path.name, exact=exact)
            fillings.append((number, own, stored.settings, filling, exact))
        for number, reason in enumerate(self.own_layouts):
            if reason:
                _load_by_deepspeed(self._context, self._context.models[number], path, number)
        for number, own, settings, filling, exact in fillings:
            filling.fill(exact=exact, optimizer=with_optimizer)
            then[number] = put_settings(own, settings, self._built[number], optimizer=with_optimizer)
            file = path / f"model{number}" / f"own_states_rank{self._context.distributed.rank}.pt"
            if exact and with_optimizer and file.is_file():
                state = base_optimizer(own.engine).state
                for index, states in read_data(file, map_location="cpu").items():
                    tensor = own.held[index].tensor
                    for key, value in states.items():
                        moved = value.to(tensor.device) if isinstance(value, torch.Tensor) else value
                        state.setdefault(tensor, {})[key] = moved
        self.then = then

    def load_weights(self, path: Path) -> None:
        """Fill the engines with the weights alone; optimizers and schedules stay as built. A collective."""
        for number, stored in enumerate(self._stored(path, settings=False)):
            engine = self._context.models[number]
            if stored is not None:
                Filling(self._slices(engine), stored).fill(exact=False, optimizer=False)
                continue
            refused = ""
            if getattr(engine, "zero_nvme_offload_optimizer", bool)():
                refused = "the optimizer's copy of the weights lies on NVMe, where it cannot be replaced"
            elif engine.zero_optimization_partition_weights():
                refused = "the weights of a model-parallel engine under ZeRO 3 cannot be read alone"
            if refused:
                key, fix = (
                    "hyperparameters.fit.warm_start",
                    "write all, at the ZeRO stage and slots of the checkpoint",
                )
                raise ConfigError(
                    Problem(key=key, value="weights", message=refused, fix=fix, code="warm-start")
                )
            parts = dict.fromkeys(("load_optimizer_states", "load_lr_scheduler_states"), False)
            _load_by_deepspeed(self._context, engine, path, number, **parts, load_module_only=True)

    def load_averages(self, path: Path) -> set[str]:
        """Continue the averages that a checkpoint holds, whichever ranks wrote them; after the engines."""
        found = set()
        for number, own in self._cut() if self._averages else ():
            if not (path / f"model{number}" / INDEX_NAME).is_file():
                continue
            stored = stored_engine(path / f"model{number}")
            there = {state for tensor in stored.index.tensors.values() for state in tensor.states}
            for name, average in self._averages.items():
                if average_state(name) in there:
                    if name not in found:
                        average.begin()
                    found.add(name)
            Filling(own, stored).fill_states(self._averaged(own, number))
        return found

    def _stored(self, path: Path, *, settings: bool) -> list[StoredEngine | None]:
        """Each engine in a checkpoint, checked against those here: all ranks refuse alike; None: DeepSpeed's to load.

        With its ``settings``, or its weights alone, which may be those of an engine that DeepSpeed wrote.
        """
        distributed, models = self._context.distributed, self._context.models
        there = sum(1 for found in path.glob("model*") if found.is_dir())
        if there != len(models):
            words = f"it holds {there} engine{'s' * (there != 1)}, and this trial has {len(models)}"
            raise another_model(path.name, words)
        found: list[StoredEngine | None] = []
        failure = ""
        try:
            for number, reason in enumerate(self.own_layouts):
                stored = (
                    None if reason else stored_engine(path / f"model{number}", weights_alone=not settings)
                )
                # The settings are read now: a file may be missing or cut.
                assert stored is None or not settings or stored.settings
                found.append(stored)
        except CheckpointError as error:
            failure = str(error)
        if failures := [each for each in distributed.allgather(failure) if each]:
            raise CheckpointError(f"checkpoint {path.name}: {failures[0]}")
        for number, (engine, stored) in enumerate(zip(models, found, strict=True)):
            if stored is None:
                continue
            everyone = distributed.allgather(Filling(self._slices(engine), stored).misfits())
            taken = {name for _, names in everyone for name in names}
            reasons = list(dict.fromkeys(reason for own, _ in everyone for reason in own))
            reasons += [
                f"{name} {tensor.shape} is not in this model"
                for name, tensor in stored.index.tensors.items()
                if name not in taken
            ]
            if reasons:
                where = f"engine {number}: " if len(models) > 1 else ""
                raise another_model(path.name, where + some_of(reasons))
        return found

    def _check_own_layouts(self, path: Path) -> None:
        """Refuse files of DeepSpeed's that these ranks did not write under this strategy.

        DeepSpeed itself would load the weights of some layouts, and leave out the optimizer.
        """
        for number, engine in enumerate(self._context.models):
            stage = engine.zero_optimization_stage()
            replicas = self._slices(engine).replicas if stage else 1
            here = (1 if stage == 2 else min(stage, 3), replicas, getattr(engine, "num_stages", 1))
            if isinstance(engine, DDPEngine):
                here = ("ddp", 1, 1)
            # The names of a planned pipeline's files are those of any schedule.
            is_known = self.own_layouts[number] or not getattr(engine.module, "is_planned", False)
            if here != layout_of(path / f"model{number}") or not is_known:
                raise CheckpointError(
                    f"checkpoint {path.name}: DeepSpeed wrote model{number} in its own layout, which only the ranks "
                    "and the strategy that wrote it can read\n  fix: resume it with those; or start from its weights, "
                    "by searcher.source_checkpoint_uuid with fit.warm_start: weights"
                )


def overrides(trial: Any, method: str) -> bool:
    """Whether a trial has its own ``save`` or ``load``."""
    own = getattr(type(trial), method)
    return own not in (getattr(det_ds.DeepSpeedTrial, method), getattr(ReconciledTrial, method))


def are_indexed(path: Path) -> bool:
    """Whether any engine in a checkpoint was written as slices."""
    return any(path.glob(f"model*/{INDEX_NAME}"))


def _load_by_deepspeed(context: Any, engine: Any, path: Path, number: int, **parts: bool) -> None:
    """Have DeepSpeed load an engine that it wrote; a collective. Nothing of its files is executed.

    Under ZeRO 3 DeepSpeed copies flat partitions, and looks at neither names nor shapes.
    """
    reason = ""
    if not isinstance(engine, DDPEngine) and engine.zero_optimization():
        file = Path(engine._get_ckpt_name(str(path), f"model{number}"))
        stored = (
            read_data(file, map_location="cpu", mmap=True).get("param_shapes") if file.is_file() else None
        )
        there, here = (
            {name: tuple(shape) for group in groups or () for name, shape in group.items()}
            for groups in (stored, engine._get_zero_param_shapes())
        )
        if stored is not None and there != here:
            names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
            words = [
                f"{name} is {there.get(name, 'missing')} in it, {here.get(name, 'missing')} here"
                for name in names
            ]
            reason = some_of(words)
    if reasons := [each for each in context.distributed.allgather(reason) if each]:
        raise another_model(path.name, reasons[0])
    with only_data():
        engine.load_checkpoint(str(path), tag=f"model{number}", **parts)


# ------------------------------------------------------------------------------------------- a rank's files


def staged(slices: Sequence[Slice], buffer: torch.Tensor | None = None) -> tuple[list[Slice], torch.Tensor]:
    """Copies of slices in host memory, which training no longer changes."""
    slices = sorted(slices, key=lambda each: -each.tensor.element_size())  # as they are written
    total = sum(each.num_bytes for each in slices)
    if buffer is None or buffer.numel() < total:
        on_gpu = any(each.tensor.is_cuda for each in slices)
        buffer = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
    copies, at = [], 0
    with torch.no_grad():
        for each in slices:
            place = buffer[at : at + each.num_bytes].view(each.tensor.dtype)
            place.copy_(each.tensor, non_blocking=True)
            copies.append(replace(each, tensor=place))
            at += each.num_bytes
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies, buffer


def write_engines(
    path: Path, taken: Sequence[Taken], beat: Callable[[], None], *, alone: bool = False
) -> Written:
    """Write this rank's files of the engines, and put them on the disk; not a collective."""
    entries, marks = {}, {}
    for each in taken:
        folder = path / each.folder
        folder.mkdir(parents=True, exist_ok=True)

        def chunks(piece: Slice) -> Iterator[memoryview]:
            for chunk in piece.tensor.split(max(1, CHUNK_BYTES // piece.tensor.element_size())):
                yield chunk.cpu().contiguous().view(torch.uint8).numpy().data

        slices = {piece.key: piece for piece in each.slices}
        streams = {
            key: Streamed(DTYPES[piece.tensor.dtype], (piece.tensor.numel(),), partial(chunks, piece))
            for key, piece in slices.items()
        }
        offsets, mark = write_shard(folder / each.shard, streams, lambda _: beat(), alone=alone)
        entries[each.folder] = tuple(
            Entry(
                piece.name,
                piece.state,
                streams[key].dtype,
                Piece(each.shard, offsets[key], piece.start, piece.tensor.numel(), piece.run, piece.stride),
            )
            for key, piece in slices.items()
        )
        marks[f"{each.folder}/{each.shard}"] = mark
        marks |= {f"{each.folder}/{name}": own for name, own in write_files(folder, each.files).items()}
    return Written(
        entries=entries,
        descriptions={each.folder: each.description for each in taken},
        fingerprints=marks,
    )


def write_files(folder: Path, files: Mapping[str, bytes | memoryview]) -> dict[str, dict[str, Any]]:
    """Write small files. Returns their sizes and checksums, as a manifest has them."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
