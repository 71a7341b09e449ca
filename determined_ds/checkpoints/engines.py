"""The engines of a trial in a checkpoint: written as slices by all ranks, and read back by any.

    model<I>/index.json              which bytes are which slice of which tensor
             rank<R>.safetensors     the slices of rank R
             settings_stage<S>.pt    settings of the optimizer, schedule, loss scale, counts; of pipeline stage S
             own_states_rank<R>.pt   an optimizer's states that cannot be cut: for the same ranks alone

An engine that cannot be cut in this way is written by DeepSpeed, see
:func:`~determined_ds.checkpoints.engine_slices.own_layout`, and a pipeline's tied layers beside it, in
``tied_rank<R>.pt``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from determined.pytorch import deepspeed as det_ds

from determined_ds.checkpoints.engine_slices import EngineSlices, Slice, own_layout, owners_of
from determined_ds.checkpoints.files import put_on_disk
from determined_ds.checkpoints.fill import Filling
from determined_ds.checkpoints.index import (
    INDEX_NAME,
    EngineIndex,
    Piece,
    StoredState,
    merged,
    write_index,
)
from determined_ds.checkpoints.reader import DTYPES, layout_of, stored_engine
from determined_ds.checkpoints.safe_load import (
    REFUSED,
    another_model,
    read_data,
    reading,
    serialized,
    some_of,
)
from determined_ds.checkpoints.settings import Record, put_settings, records_of, settings_of
from determined_ds.checkpoints.shard_file import Streamed, write_shard
from determined_ds.errors import CheckpointError
from determined_ds.rundir.signals import HEART
from determined_ds.train.memory import base_optimizer
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.divided import degree_of, expert_degree_of
from determined_ds.trial.returned import method_of

T = TypeVar("T")
STATES_OF_ADAM_BYTES = 8  # a parameter
CHUNK_BYTES = 2**23


@dataclass(kw_only=True)
class Written:
    """What this rank wrote, or is to write."""

    indexes: dict[str, EngineIndex] = field(default_factory=dict)  # folder of an engine -> its slices
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)  # file -> size and checksum
    uploaded: bool = False  # those files are in another storage, too


class Engines:
    """The engines of a trial.

    Made by all ranks at once, before anything is loaded or trained.

    Attributes:
        built: What each engine was built with.
        then: Number of an engine -> what it was built with in the checkpoint that was loaded.
        own_layouts: Of each engine why DeepSpeed writes it in its own layout; "" where it is written as slices.
        buffers: Number of an engine -> host memory for its copy; None: they are written at once.
        written: Of the last :meth:`save`; None where the trial's own ``save`` did not call ours.
        jobs: What writes the copies that it took, for a thread.
    """

    def __init__(self, trial: Any, context: Any) -> None:
        self._trial = trial
        self._context = context
        self._models = context.models
        self._distributed = context.distributed
        self.built = records_of(context.models)
        self.then: dict[int, Record] = {}
        self.buffers: dict[int, torch.Tensor] | None = None
        self.written: Written | None = None
        self.jobs: list[Callable[[Callable[[], None]], None]] = []
        # A stage that has no part of a layer does not see what is against it: what one rank finds, all go by.
        reasons = self._distributed.allgather([own_layout(engine) for engine in self._models])
        self.own_layouts = [next(filter(None, found), "") for found in zip(*reasons, strict=True)]
        types = [
            f"{whole.kind} {whole.name} is of {whole.tensor.dtype}, which no checkpoint can hold\n  fix: convert it, "
            "or register a buffer with persistent=False where it need not be kept"
            for _, own in self._cut()
            for whole in own.wholes()
            if whole.tensor.dtype not in DTYPES
        ]
        if found := [each for own in self._distributed.allgather(types) for each in own]:
            raise CheckpointError(found[0])

    def _cut(self) -> Iterator[tuple[int, EngineSlices]]:
        """The engines that are written as slices, by number."""
        names = getattr(self._trial, "weight_names", None)
        for number, engine in enumerate(self._models):
            if not self.own_layouts[number]:
                yield number, EngineSlices(engine, None if names is None else names(engine.module))

    def own_layout(self) -> str:
        """Why only the ranks that wrote the engines last, under their strategy, can read them; "" where others can."""
        if reason := next(filter(None, self.own_layouts), ""):
            return reason
        method = "load" if overrides(self._trial, "load") else "save" if self.written is None else ""
        return f"{method_of(self._trial, method)} decides itself what is written and read" if method else ""

    def _layout(self, own: EngineSlices) -> dict[str, Any]:
        """What must be the same for a resume that changes nothing at all."""
        engine = own.engine
        return {
            "ranks": self._distributed.size,
            "replicas": own.replicas,
            "zero_stage": engine.zero_optimization_stage(),
            "kind": type(engine.optimizer).__name__,
            "optimizer": own.index.optimizer,
            "owners": owners_of(engine),
            "model_parallel_size": degree_of(engine),
            "expert_parallel_size": expert_degree_of(engine),
        }

    # ------------------------------------------------------------------------------------- written

    def save(self, path: Path) -> None:
        """Write this rank's files of the engines, or take copies of them for :attr:`jobs`; a collective."""
        written, self.jobs = Written(), []
        for number, engine in enumerate(self._models):
            if self.own_layouts[number]:
                engine.save_checkpoint(str(path), tag=f"model{number}")
                tied, file = self._tied(number, path)
                if tied:
                    torch.save(tied.state_dict(), file)
        for number, own in self._cut():
            rank, folder, files = self._distributed.rank, path / f"model{number}", dict[str, Any]()
            if own.is_first:
                settings = {**settings_of(own, self.built[number]), "layout": self._layout(own)}
                files[f"settings_stage{getattr(own.engine, 'stage_id', 0)}.pt"] = settings
            states = {index: own.states_of(held)[2] for index, held in enumerate(own.held)}
            if others := {index: each for index, each in states.items() if each}:
                files[f"own_states_rank{rank}.pt"] = others
            contents = {name: serialized(content).getbuffer() for name, content in files.items()}
            slices = own.written()
            if self.buffers is not None:
                slices = self._copied(slices, number)
            written.indexes[folder.name] = index = own.described()
            shard = folder / f"rank{rank}.safetensors"
            job = partial(_write, shard, slices, contents, index, written.fingerprints)
            if self.buffers is None:  # before a trial's own save continues, which may read or change them
                job(HEART.beat)
            else:
                self.jobs.append(job)
        self.written = written

    def _copied(self, slices: Sequence[Slice], number: int) -> list[Slice]:
        """Copies of an engine's slices in host memory, which training no longer changes."""
        assert self.buffers is not None
        slices = sorted(slices, key=lambda each: -each.tensor.element_size())  # so that each is aligned
        total = sum(each.num_bytes for each in slices)
        buffer = self.buffers.get(number)
        if buffer is None or buffer.numel() < total:
            on_gpu = any(each.tensor.is_cuda for each in slices)
            buffer = self.buffers[number] = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies, at = [], 0
        with torch.no_grad():
            for each in slices:
                place = buffer[at : at + each.num_bytes].view(each.tensor.dtype)
                place.copy_(each.tensor, non_blocking=True)
                copies.append(replace(each, tensor=place))
                at += each.num_bytes
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copies

    def copy_bytes(self) -> int:
        """Bytes of host memory for a copy of the engines; states that are not there yet are taken for Adam's."""
        total = 0
        for _, own in self._cut():
            slices = own.written()
            unborn = sum(
                lies.length for held in own.held if not any(own.states_of(held)) for lies in held.lies
            )
            unborn_bytes = STATES_OF_ADAM_BYTES * unborn // (1 if own.is_split else own.replicas)
            count = sum(each.num_bytes for each in slices) + unborn_bytes
            is_pinned = any(each.tensor.is_cuda for each in slices)
            total += 1 << (count - 1).bit_length() if is_pinned else count  # torch pins powers of two
        return total

    def write_indexes(self, path: Path, written: Written) -> None:
        """Have rank 0 write the index of each engine; a collective."""
        everyone = self._distributed.gather(written.indexes)
        for folder in written.indexes if everyone is not None else ():
            write_index(path / folder, merged([each[folder] for each in everyone]))
        self._distributed.allgather(None)  # callbacks of every rank see it

    # ------------------------------------------------------------------------------------- read

    def load(self, path: Path, *, weights_alone: bool = False) -> None:
        """Fill the engines from a checkpoint of any layout, or with its weights alone; a collective."""
        is_ours = weights_alone or any(path.glob(f"model*/{INDEX_NAME}"))
        self.then, fillings = {}, self._fillings(path, settings=not weights_alone) if is_ours else {}
        exact = dict[int, bool]()
        for number, each in fillings.items():
            is_same = not weights_alone and each.stored.settings.get("layout") == self._layout(each.own)
            exact[number] = is_same
            if not weights_alone:
                each.check_optimizer(path.name, exact=is_same)
        for number in range(len(self._models)):
            if number not in fillings:
                self._load_by_deepspeed(path, number, weights_alone=weights_alone)
        for number, filling in fillings.items():
            own, stored = filling.own, filling.stored
            filling.fill(exact=exact[number], optimizer=not weights_alone)
            if weights_alone:
                continue
            self.then[number] = put_settings(own, stored.settings, self.built[number])
            file = stored.folder / f"own_states_rank{self._distributed.rank}.pt"
            if exact[number] and file.is_file():
                state = base_optimizer(own.engine).state
                for index, states in read_data(file, map_location="cpu").items():
                    tensor = own.held[index].tensor
                    for key, value in states.items():
                        moved = value.to(tensor.device) if isinstance(value, torch.Tensor) else value
                        state.setdefault(tensor, {})[key] = moved

    def _fillings(self, path: Path, *, settings: bool) -> dict[int, Filling]:
        """What fills each engine but those that DeepSpeed loads, checked before any is filled: all ranks refuse alike.

        With its ``settings``, or its weights alone, which may be those of an engine that DeepSpeed wrote.
        """
        there = sum(1 for found in path.glob("model*") if found.is_dir())
        if there != len(self._models):
            words = f"it holds {there} engine{'s' * (there != 1)}, and this trial has {len(self._models)}"
            raise another_model(path.name, words)

        def read() -> dict[int, Filling]:
            found = {}
            for number, own in self._cut():
                stored = stored_engine(path / f"model{number}", weights_alone=not settings)
                # The settings are read now: a file may be missing or cut.
                assert not settings or stored.settings
                found[number] = Filling(own, stored)
            return found

        fillings = together(self._distributed, read, f"checkpoint {path.name}: ")
        for number, filling in fillings.items():
            everyone = self._distributed.allgather((filling.misfits(), set(filling.names.values())))
            reasons = list(dict.fromkeys(reason for own, _ in everyone for reason in own))
            taken = set().union(*(names for _, names in everyone))
            reasons += [
                f"{name} {tensor.shape} is not in this model"
                for name, tensor in filling.stored.index.tensors.items()
                if name not in taken
            ]
            if reasons:
                where = f"engine {number}: " if len(self._models) > 1 else ""
                raise another_model(path.name, where + some_of(reasons))
        return fillings

    def _load_by_deepspeed(self, path: Path, number: int, *, weights_alone: bool = False) -> None:
        """Have DeepSpeed load an engine that it wrote; a collective. Nothing of its files is executed.

        Of some layouts DeepSpeed would load the weights, and leave out the optimizer; under ZeRO 3 it copies flat
        partitions, and looks at neither names nor shapes. Both are refused.
        """
        engine, reason, folder = self._models[number], "", path / f"model{number}"
        if weights_alone and (
            engine.zero_nvme_offload_optimizer() or engine.zero_optimization_partition_weights()
        ):
            raise CheckpointError(
                f"an engine under ZeRO 3 or NVMe cannot take weights alone where {self.own_layouts[number]}\n"
                "  fix: fit.warm_start: all, at the ZeRO stage and slots of the checkpoint"
            )
        stage = engine.zero_optimization_stage()
        replicas = EngineSlices(engine).replicas if stage else 1
        here = (1 if stage == 2 else min(stage, 3), replicas, getattr(engine, "num_stages", 1))
        here = ("ddp", 1, 1) if isinstance(engine, DDPEngine) else here
        # The names of a planned pipeline's files are those of any schedule.
        is_known = self.own_layouts[number] or not getattr(engine.module, "is_planned", False)
        if not weights_alone and (here != layout_of(folder) or not is_known):
            raise CheckpointError(
                f"checkpoint {path.name}: {folder.name} is in a layout that only the ranks and the strategy that wrote "
                "it can read\n  fix: resume it with those; or start from its weights, by "
                "searcher.source_checkpoint_uuid with fit.warm_start: weights"
            )
        if not isinstance(engine, DDPEngine) and engine.zero_optimization():
            file = Path(engine._get_ckpt_name(str(path), f"model{number}"))
            stored = read_data(file, map_location="cpu", mmap=True) if file.is_file() else {}
            then, now = (
                {name: tuple(shape) for group in groups or () for name, shape in group.items()}
                for groups in (stored.get("param_shapes"), engine._get_zero_param_shapes())
            )
            if "param_shapes" in stored and then != now:
                names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
                pairs = ((name, then.get(name, "missing"), now.get(name, "missing")) for name in names)
                reason = some_of([f"{name} is {was} in it, {own} here" for name, was, own in pairs])
        if reasons := [each for each in self._distributed.allgather(reason) if each]:
            raise another_model(path.name, reasons[0])
        tied, file = self._tied(number, path)
        if tied and file.is_file():  # before DeepSpeed makes an optimizer's copy of the weights
            tied.load_state_dict(read_data(file, map_location="cpu"))
        with reading(f"checkpoint {path.name}", REFUSED):
            engine.load_checkpoint(str(path), tag=f"model{number}", load_module_only=weights_alone)

    def _tied(self, number: int, path: Path) -> tuple[Any, Path]:
        """A stage's layers that others have too, and their file: DeepSpeed saves none that a ``forward_fn`` calls."""
        tied = getattr(self._models[number].module, "tied_modules", None)
        return tied, path / f"model{number}" / f"tied_rank{self._distributed.rank}.pt"


def overrides(trial: Any, method: str) -> bool:
    """Whether a trial has its own ``save`` or ``load``."""
    own = getattr(type(trial), method)
    return own not in (getattr(det_ds.DeepSpeedTrial, method), getattr(ReconciledTrial, method))


def together(distributed: Any, read: Callable[[], T], where: str = "") -> T:
    """What this rank reads; where any rank cannot, all raise the same, after ``where``; a collective."""
    found, failure = None, ""
    try:
        found = read()
    except CheckpointError as error:
        failure = str(error)
    if failures := [each for each in distributed.allgather(failure) if each]:
        raise CheckpointError(f"{where}{failures[0]}")
    return found  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------- a rank's files


def _write(
    shard: Path,
    slices: Sequence[Slice],
    files: Mapping[str, memoryview],
    index: EngineIndex,
    fingerprints: dict[str, dict[str, Any]],
    beat: Callable[[], None],
) -> None:
    """Write this rank's files of an engine, put them on the disk, and fill its index; not a collective."""

    def chunks(tensor: Any) -> Iterator[memoryview]:
        for chunk in tensor.split(max(1, CHUNK_BYTES // tensor.element_size())):
            yield chunk.cpu().contiguous().view(torch.uint8).numpy().data
            beat()

    folder = shard.parent
    folder.mkdir(parents=True, exist_ok=True)
    by_key = {each.key: each for each in slices}  # of a router DeepSpeed has copies
    streams = {
        key: Streamed(DTYPES[each.tensor.dtype], (each.place.length,), partial(chunks, each.tensor))
        for key, each in by_key.items()
    }
    offsets, mark = write_shard(shard, streams)
    for key, each in by_key.items():
        states = index.tensors[each.whole.name].states
        state = states.setdefault(each.state, StoredState(dtype=streams[key].dtype, pieces=[]))
        state.pieces.append(Piece(shard.name, offsets[key], *each.place))
    for name, own in {shard.name: mark, **write_files(folder, files)}.items():
        fingerprints[f"{folder.name}/{name}"] = own


def write_files(folder: Path, files: Mapping[str, bytes | memoryview]) -> dict[str, dict[str, Any]]:
    """Write small files to the disk. Returns their sizes and checksums, as a manifest has them."""
    marks = {}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        put_on_disk(folder / name)
        marks[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return marks
