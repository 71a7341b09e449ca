"""slots = pipe x model x sequence x data: how the slots of a trial are laid out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from determined_ds.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The parallel degrees, whose product is the number of slots.

    Args:
        pipe_parallel_size: Pipeline stages (1: no pipeline).
        model_parallel_size: Ranks that share one layer (tensor parallel).
        data_parallel_world_size: Replicas: groups of ranks that share a micro-batch.
        sequence_parallel_size: Ranks that share a sequence, each with a slice of its tokens (Ulysses).
        pipe_within_machine: Ranks are counted through the stages of one replica before the next, so that neighbours
            in a pipeline are neighbours on a machine; else through the replicas of one stage before the next.
    """

    pipe_parallel_size: int
    model_parallel_size: int
    data_parallel_world_size: int
    sequence_parallel_size: int = 1
    pipe_within_machine: bool = False

    @property
    def per_replica(self) -> int:
        """Ranks that share a micro-batch."""
        return self.pipe_parallel_size * self.model_parallel_size * self.sequence_parallel_size

    @property
    def slots(self) -> int:
        """Ranks in all; a slot is Determined's device, and each carries one rank."""
        return self.per_replica * self.data_parallel_world_size

    @property
    def axes(self) -> dict[str, int]:
        """Name of each axis -> its size; ranks count through the last one first.

        Ranks that share a layer or a sequence wait for each other several times a layer, and are always neighbours.

        Source: deepspeed 0.19.8 runtime/pipe/topology.py PipeDataParallelTopology; utils/groups.py.
        """
        pipe, data = ("pipe", self.pipe_parallel_size), ("data", self.data_parallel_world_size)
        outer = (data, pipe) if self.pipe_within_machine else (pipe, data)
        return dict([*outer, ("sequence", self.sequence_parallel_size), ("model", self.model_parallel_size)])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis.

        Args:
            rank: From 0, counted machine by machine.

        Returns:
            Name of each axis -> index on it.
        """
        found = {}
        for name, size in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.axes}


def resolve_topology(
    *,
    slots: int,
    pipe_parallel_size: int = 1,
    model_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    data_parallel_world_size: int | None = None,
    pipe_within_machine: bool = False,
    origins: dict[str, str] | None = None,
) -> Topology:
    """Lay out ``slots`` as pipe x model x sequence x data; the data degree is derived where it is None.

    Args:
        slots: Ranks in all, >= 1.
        pipe_parallel_size: >= 1.
        model_parallel_size: >= 1.
        sequence_parallel_size: >= 1.
        data_parallel_world_size: >= 1, or None to derive it.
        pipe_within_machine: See :class:`Topology`.
        origins: Name of each argument -> where its value came from, for messages.

    Raises:
        ConfigError: the product cannot be ``slots``; names the slots that would do.
    """
    origins = origins or {}
    sizes = {
        "pipe_parallel_size": pipe_parallel_size,
        "model_parallel_size": model_parallel_size,
        "sequence_parallel_size": sequence_parallel_size,
    }
    per_replica = math.prod(sizes.values())
    layout = " x ".join(
        f"{name} {size}" + (f" ({origins[name]})" if origins.get(name) else "")
        for name, size in sizes.items()
    )
    if slots % per_replica:
        raise ConfigError(
            Problem(
                key="slots_per_trial",
                value=slots,
                origin=origins.get("slots", ""),
                message=f"{layout} = {per_replica} slots a replica, which does not divide {slots} slots",
                fix="use " + ", or ".join(_layouts_near(slots, sizes)),
                code="topology",
            )
        )
    replicas = slots // per_replica
    if data_parallel_world_size is not None and data_parallel_world_size != replicas:
        raise ConfigError(
            Problem(
                key="hyperparameters.data_parallel_world_size",
                value=data_parallel_world_size,
                origin=origins.get("data_parallel_world_size", ""),
                message=f"{slots} slots{_in_brackets(origins.get('slots'))} / ({layout})"
                f" make {replicas} replica{'s' if replicas > 1 else ''}",
                fix=f"write {replicas} or auto, or use {data_parallel_world_size * per_replica} slots",
                code="topology",
            )
        )
    return Topology(**sizes, data_parallel_world_size=replicas, pipe_within_machine=pipe_within_machine)


def whole_sequences(name: str, size: int) -> Problem:
    """The problem of a trial that computes on whole sequences.

    Args:
        name: Of its class.
        size: Ranks that are to share a sequence.
    """
    key, message = "hyperparameters.sequence_parallel_size", f"{name} computes on whole sequences"
    fix = "set it to 1; or write the trial for slices, and say so by sequence_parallel = True"
    return Problem(key=key, value=size, message=message, fix=fix, code="sequence-trial")


def _in_brackets(origin: str | None) -> str:
    return f" ({origin})" if origin else ""


def _layouts_near(slots: int, sizes: Mapping[str, int]) -> list[str]:
    """The nearest numbers of slots that would do, then the nearest of each parallel size, all else left alone."""
    per_replica = math.prod(sizes.values())
    below, above = slots // per_replica * per_replica, (slots // per_replica + 1) * per_replica
    found = [f"{below} or {above} slots" if below else f"{above} slots"]
    for name, size in sizes.items():
        others = per_replica // size
        if size > 1 and slots % others == 0:
            best = nearest_divisor(slots // others, size)
            if best is not None:
                found.append(f"{name} {best}")
    return found


LARGEST_FACTORED = 10**12


def nearest_divisor(number: int, to: int) -> int | None:
    """The divisor of ``number`` that is nearest to ``to``, the smaller of two; None where finding it takes long."""
    if number > LARGEST_FACTORED:
        return None
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = [*small, *(number // divisor for divisor in small)]
    return min(divisors, key=lambda divisor: (abs(divisor - to), divisor))
