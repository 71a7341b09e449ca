"""The parts of ranks, for other ranks than wrote them: nothing of the old ranks is lost, and nothing doubled.

Generators, callbacks and a script's objects follow the replica; the position in the data is the same on every replica.
Metrics and custom reducers begin anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.elastic import DATA_FIX, apart_refusal
from determined_ds.runtime.checkpoints.built import Record
from determined_ds.runtime.data.samples import APART
from determined_ds.runtime.data.seeds import SEED, mixed_seed

logger = logging.getLogger("determined_ds")
Part = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank stands.

    Args:
        rank: Which.
        ranks: How many there are.
        replica: The data-parallel copy that it holds, or a part of.
        replicas: How many there are.
        member: Which of the ranks that hold the replica, such as its pipeline stage.
        members: How many hold it.
        calls: Training metrics of an optimizer step, over all replicas.
        micro_batch_size: Samples of a replica in a forward pass.
        owners: Of each engine, which stage of its pipeline holds each layer; empty where a checkpoint does not say.
        copies: Neighbouring ranks that compute the same losses, of which the first counts (tensor parallel).
    """

    rank: int
    ranks: int
    replica: int
    replicas: int
    member: int
    members: int
    calls: int
    micro_batch_size: int
    owners: tuple[tuple[int, ...], ...] = ()
    copies: int = 1

    @property
    def layout(self) -> tuple[int, ...]:
        """What has to be the same for a rank to take the part of the rank of its number, beside :attr:`owners`."""
        return self.rank, self.ranks, self.replica, self.replicas, self.member, self.members, self.copies

    def holds_same(self, other: RankPlace) -> bool:
        """Whether the rank that wrote ``other`` held the same layers, and so read the same data.

        One that does not say which it held was of a pipeline with one part a rank.
        """
        is_plain = all(list(owners) == sorted(owners) for owners in self.owners)
        return self.layout == other.layout and (
            self.owners == other.owners or (not other.owners and is_plain)
        )


@dataclass(frozen=True, kw_only=True)
class OfAll:
    """The states that several ranks have written, for an owner whose ``load_whole`` takes them all."""

    states: tuple[Any, ...]


def load_into(owner: Any, state: Any) -> None:
    """Give an owner its state, or those of several ranks."""
    if isinstance(state, OfAll):
        owner.load_whole(state.states)
    else:
        owner.load_state_dict(state)


def part_for(
    here: RankPlace, old: Sequence[Part], owners: Mapping[str, Any], *, seed: int, batch: int
) -> dict[str, Any]:
    """The part of a rank, out of the parts of all ranks that wrote a checkpoint.

    Args:
        here: The rank's place.
        old: By rank, each with its ``place``.
        owners: Name -> callback.
        seed: Of the trial.
        batch: Optimizer steps trained.

    Raises:
        CheckpointError: the training data has a position on each replica, and there are other replicas now.
    """
    places = [RankPlace(**part["place"]) for part in old]
    nearest = old[counterpart(places, here) or 0]
    kept: dict[str, Any] = {name: state for name, state in nearest.items() if name not in ("place", "built")}
    kept["callbacks"] = {
        name: OfAll(states=tuple(_states(old, "callbacks", name)))
        if hasattr(owners.get(name), "load_whole")
        else _one_for_all(f"callback {name!r}", nearest["callbacks"][name], _states(old, "callbacks", name))
        for name in nearest["callbacks"]
    }
    kept["parts"] = {
        name: _one_for_all(f"the state of {name!r}", state, _states(old, "parts", name))
        for name, state in nearest["parts"].items()
        if name not in ("metrics", "reducers", "data")
    }
    kept["parts"]["data"] = position([part["parts"].get("data") or {} for part in old], places, here)
    kept["rng_state"] = generators_for(
        here, places, [part["rng_state"] for part in old], seed=seed, batch=batch
    )
    if nearest.get("built") is not None:
        kept["built"] = union_of([part["built"] for part in old])
    return kept


def counterpart(places: Sequence[RankPlace], here: RankPlace) -> int | None:
    """The old rank that held the same replica: of several that with the same part of it, else the first; None: none."""
    held = [place for place in places if place.replica == here.replica]
    same = [place for place in held if (place.member, place.members) == (here.member, here.members)]
    found = (same or held)[:1]
    return found[0].rank if found else None


def generators_for(
    here: RankPlace, places: Sequence[RankPlace], states: Sequence[Any], *, seed: int, batch: int
) -> dict[str, Any]:
    """The state of the generators: that of the replica, or for a further one a seed that no replica had before."""
    rank = counterpart(places, here)
    return {SEED: mixed_seed(seed, here.replica, batch)} if rank is None else dict(states[rank])


def position(
    states: Sequence[Mapping[str, Any]], places: Sequence[RankPlace], here: RankPlace
) -> dict[str, Any]:
    """The position in the training data, which ranks without a data loader do not have.

    Raises:
        CheckpointError: it is one of each replica, and there are other replicas or micro-batches now.
    """
    found = {
        place.replica: state for place, state in zip(reversed(places), reversed(states), strict=True) if state
    }
    if not found:
        return {}
    state = found.get(here.replica) or found[min(found)]
    then = places[0].replicas, places[0].micro_batch_size
    reason = apart_refusal(state.get(APART), then=then, now=(here.replicas, here.micro_batch_size))
    if reason:
        raise CheckpointError(f"{reason}\n  fix: {DATA_FIX}")
    return dict(state)


def union_of(built: Sequence[Sequence[Record]]) -> list[Record]:
    """What the engines were built with, the parameters of all ranks together: a pipeline's stages have some each."""
    return [
        {
            **of_engine[0],
            "parameters": {name: each for own in of_engine for name, each in own["parameters"].items()},
        }
        for of_engine in zip(*built, strict=True)
    ]


def _states(parts: Sequence[Part], kind: str, name: str) -> list[Any]:
    return [part[kind][name] for part in parts if name in part[kind]]


def _one_for_all(owner: str, own: Any, states: Sequence[Any]) -> Any:
    """The state to continue with; a warning where ranks had several, since those of ranks that are gone are lost."""
    if not all(is_equal(own, state) for state in states):
        logger.warning(
            "warning: %s differed between the ranks that wrote the checkpoint, and the ranks are others now: that of "
            "the same replica, or of rank 0, is kept\n  fix: to join them, give it load_whole(states), with those of "
            "all ranks",
            owner,
        )
    return own


def is_equal(first: Any, second: Any) -> bool:
    """Whether two states are the same, to the last bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(is_equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return bool(repr(first) == repr(second))
