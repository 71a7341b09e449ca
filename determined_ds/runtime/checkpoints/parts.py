"""Each rank's own part of a checkpoint: generators, callbacks, custom reducers, unreported sums, position in the data.

1. A rank writes its part with its place: which replica it holds, and which of that replica's ranks it is.
2. Ranks in the places of those that wrote read their own parts, bit for bit.
3. Other ranks read all parts, see :mod:`~determined_ds.runtime.checkpoints.redistributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.elastic import LOAD_DATA, elastic_refusal, written_by
from determined_ds.protocol.handed_on import count
from determined_ds.runtime.checkpoints import contents
from determined_ds.runtime.checkpoints.all_engines import overrides
from determined_ds.runtime.checkpoints.built import Record, misfit
from determined_ds.runtime.checkpoints.redistributed import (
    Part,
    RankPlace,
    part_for,
    position,
    union_of,
)
from determined_ds.runtime.checkpoints.slices import owners_of
from determined_ds.trial.author import method_of
from determined_ds.trial.tensor_parallel import degree_of

SUMS_ANEW = "training metrics since the last report begin anew"


def place_of(context: Any) -> RankPlace:
    """The place of this rank; a collective."""
    distributed, mpu, batch = context.distributed, context._mpu, context.resolved.batch
    holds = distributed.allgather(mpu.data_parallel_rank)
    rank, replica = distributed.rank, mpu.data_parallel_rank
    in_one_call = context.use_pipeline_parallel or context._manual_grad_accumulation
    return RankPlace(
        rank=rank,
        ranks=distributed.size,
        replica=replica,
        replicas=mpu.data_parallel_world_size,
        member=holds[:rank].count(replica),
        members=holds.count(replica),
        calls=mpu.data_parallel_world_size * (1 if in_one_call else batch.accumulation),
        micro_batch_size=batch.micro_batch_size,
        owners=tuple(owners_of(engine) for engine in context.models),
        copies=max((degree_of(engine) for engine in context.models), default=1),
    )


class RankParts:
    """Writes and reads the parts of ranks.

    Args:
        trial: That may read checkpoints itself.
        context: Of the trial.
        callbacks: Name -> callback.
    """

    def __init__(self, trial: Any, context: Any, callbacks: Mapping[str, Any]) -> None:
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._here: RankPlace | None = None

    @property
    def here(self) -> RankPlace:
        """The place of this rank; the first call is a collective."""
        if self._here is None:
            self._here = place_of(self._context)
        return self._here

    def written(self) -> dict[str, Any]:
        """The place of this rank, for its part; the first call is a collective."""
        return asdict(self.here)

    def written_by(self, own_layout: str, data: Any) -> dict[str, Any]:
        """Who writes a checkpoint, see :func:`~determined_ds.protocol.elastic.written_by`; a collective at first.

        Args:
            own_layout: Why only the ranks that write the engines can read them; "" where others can, too.
            data: The part of the training data, which may have a position on each replica.
        """
        here, context = self.here, self._context
        return {
            "ranks": here.ranks,
            "replicas": here.replicas,
            "micro_batch_size": here.micro_batch_size,
            "engine": context.engine,
            "own_layout": own_layout or None,
            "data_apart": getattr(data, "apart", None),
        }

    def read(self, path: Path, uuid: str, *, batch: int) -> tuple[dict[str, Any], str]:
        """This rank's part; a collective.

        Args:
            path: The checkpoint's folder.
            uuid: Of the checkpoint, for messages.
            batch: Optimizer steps that it was trained for.

        Returns:
            The part; and a line for people where other ranks wrote the checkpoint than read it, "" where the same did.

        Raises:
            CheckpointError: a part cannot be read, or only by the ranks that wrote it.
        """
        here = self.here
        num_written = len(list(path.glob("det_state_dict_rank*.pth")))
        was_trained = num_written or (path / LOAD_DATA).is_file()
        if not any(self._context.distributed.allgather(was_trained)):  # it was imported
            return {}, ""
        own = self._together(lambda: self._own(path, uuid) if num_written == here.ranks else {})
        place = own.get("place")
        stays = bool(own) and (place is None or here.holds_same(RankPlace(**place)))
        if all(self._context.distributed.allgather(stays)):
            return (own if place is None else self._as_it_is(own, RankPlace(**place))), ""
        self._check(path, uuid, num_written)
        part = self._together(lambda: self._joined(path, uuid, num_written, batch))
        return part, f"{self._in_words(path, num_written)}; {SUMS_ANEW}"

    def _together(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What this rank reads; where any rank cannot, all raise the same."""
        part: dict[str, Any] = {}
        failure = ""
        try:
            part = read()
        except CheckpointError as error:
            failure = str(error)
        if failures := [each for each in self._context.distributed.allgather(failure) if each]:
            raise CheckpointError(failures[0])
        return part

    def _in_words(self, path: Path, num_written: int) -> str:
        before, here = written_by(path), self.here
        then = f"{count(num_written, 'rank')}"
        if before:
            then += f" ({count(before['replicas'], 'replica')}, {before['engine']})"
        now = f"{count(here.ranks, 'rank')} ({count(here.replicas, 'replica')}, {self._context.engine})"
        if then == now:
            return f"elastic     {now}, with other layers of the pipeline each"
        return f"elastic     {then} -> {now}"

    def _own(self, path: Path, uuid: str) -> dict[str, Any]:
        where = contents.to_their_kind_of_device(self._context.device)
        return dict(_loaded(path, uuid, self.here.rank, map_location=where))

    def _as_it_is(self, own: dict[str, Any], place: RankPlace) -> dict[str, Any]:
        """The part of a rank whose place is the same; the micro-batch may have changed."""
        parts = dict(own.get("parts", {}))
        if parts.get("data"):
            parts["data"] = position([parts["data"]], [place], self.here)
        if place.calls != self.here.calls:  # then a step adds another number of losses
            parts.pop("metrics", None)
        return {**own, "parts": parts}

    def _check(self, path: Path, uuid: str, num_written: int) -> None:
        reason = elastic_refusal(path)
        if reason is None and overrides(self._trial, "load"):
            reason = f"{method_of(self._trial, 'load')} decides itself what is read"
        if reason is None:
            return
        raise CheckpointError(
            f"checkpoint {uuid} was written by {count(num_written, 'rank')}, and these are {self.here.ranks}, or hold "
            f"other parts of the model; only those can read it: {reason}\n  fix: resume with {num_written} slots, and "
            "the pipeline and model-parallel sizes that wrote it"
        )

    def _joined(self, path: Path, uuid: str, num_written: int, batch: int) -> dict[str, Any]:
        host = _OnHost(self._context.device)
        old = [_loaded(path, uuid, rank, map_location=host, mmap=True) for rank in range(num_written)]
        old = [{"place": _assumed(rank, num_written, self.here), **part} for rank, part in enumerate(old)]
        seed = self._context.get_trial_seed()
        part = part_for(self.here, old, self._callbacks, seed=seed, batch=batch)
        for kind in ("callbacks", "parts"):
            part[kind] = {name: host.moved_back(state) for name, state in part[kind].items()}
        return part


def check_fits(
    then: list[Record] | None, now: list[Record], uuid: str, distributed: Any, *, by_others: bool
) -> None:
    """Refuse the checkpoint of another model before anything is loaded; a collective.

    DeepSpeed would end in an error of torch's; under ZeRO 3, which compares sizes alone, in none at all.

    Args:
        then: What the engines in it were built with; None where it does not say.
        now: What those of this rank are built with.
        uuid: Of the checkpoint.
        distributed: The ranks.
        by_others: Whether other ranks wrote it.
    """
    # A pipeline's stages have some parameters each, and may be other stages than those that wrote it.
    everything = union_of(distributed.allgather(now)) if by_others else now
    own = misfit(then, everything) if then is not None else None
    if found := [reason for reason in distributed.allgather(own) if reason]:
        raise contents.another_model(uuid, found[0])


def _loaded(path: Path, uuid: str, rank: int, **options: Any) -> Part:
    file = path / f"det_state_dict_rank{rank}.pth"
    part = contents.read_data(file, **options)
    if not isinstance(part, dict):
        raise CheckpointError(
            f"checkpoint {uuid}: {file.name} does not hold the part of a rank\n  fix: use another checkpoint"
        )
    return part


def _assumed(rank: int, ranks: int, here: RankPlace) -> dict[str, Any]:
    """The place of a rank that did not write it: each held a replica."""
    place = RankPlace(
        rank=rank,
        ranks=ranks,
        replica=rank,
        replicas=ranks,
        member=0,
        members=1,
        calls=here.calls,
        micro_batch_size=here.micro_batch_size,
    )
    return asdict(place)


class _OnHost:
    """``torch.load``'s ``map_location`` for the parts of all ranks: they stay on the host until one is chosen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: set[int] = set()

    def __call__(self, storage: Any, location: str) -> Any:
        if self._device.type != "cpu" and location.startswith(self._device.type):
            self._moved.add(storage.data_ptr())
        return storage

    def moved_back(self, value: Any) -> Any:
        """A state with the tensors on this rank's device that were on one; not those of :class:`OfAll`."""
        if isinstance(value, torch.Tensor):
            is_moved = value.untyped_storage().data_ptr() in self._moved
            return value.to(self._device) if is_moved else value
        if isinstance(value, dict):
            return {key: self.moved_back(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self.moved_back(each) for each in value)
        return value
