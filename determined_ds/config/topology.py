"""slots = pipe x model x data: how the slots of a trial are laid out."""

from __future__ import annotations

from dataclasses import dataclass

from determined_ds.errors import ConfigError, Problem


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The three parallel degrees, whose product is the number of slots.

    Args:
        pipe_parallel_size: Pipeline stages (1: no pipeline).
        model_parallel_size: Ranks that share one layer (tensor parallel).
        data_parallel_world_size: Replicas, i.e. data-parallel copies of the model.
    """

    pipe_parallel_size: int
    model_parallel_size: int
    data_parallel_world_size: int

    @property
    def slots(self) -> int:
        """Ranks in all; a slot is Determined's device, and each carries one rank."""
        return self.pipe_parallel_size * self.model_parallel_size * self.data_parallel_world_size

    @property
    def slots_per_replica(self) -> int:
        return self.pipe_parallel_size * self.model_parallel_size


def resolve_topology(
    *,
    slots: int,
    pipe_parallel_size: int = 1,
    model_parallel_size: int = 1,
    data_parallel_world_size: int | None = None,
    origins: dict[str, str] | None = None,
) -> Topology:
    """Lay out ``slots`` as pipe x model x data; the data degree is derived where it is None.

    Args:
        slots: Ranks in all, >= 1.
        pipe_parallel_size: >= 1.
        model_parallel_size: >= 1.
        data_parallel_world_size: >= 1, or None to derive it.
        origins: Name of each argument -> where its value came from, for messages.

    Raises:
        ConfigError: the product cannot be ``slots``; names the slots that would do.
    """
    origins = origins or {}
    per_replica = pipe_parallel_size * model_parallel_size
    layout = f"pipe_parallel_size {pipe_parallel_size} x model_parallel_size {model_parallel_size}"
    if slots % per_replica:
        below, above = slots // per_replica * per_replica, (slots // per_replica + 1) * per_replica
        feasible = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            Problem(
                key="slots_per_trial",
                value=slots,
                origin=origins.get("slots", ""),
                message=f"{layout} = {per_replica} slots a replica, which does not divide {slots} slots",
                mend=f"use {feasible} slots, or parallel sizes whose product divides {slots}",
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
                message=f"{slots} slots / ({layout}) make {replicas} replicas",
                mend=f"write {replicas} or auto, or use {data_parallel_world_size * per_replica} slots",
                code="topology",
            )
        )
    return Topology(
        pipe_parallel_size=pipe_parallel_size,
        model_parallel_size=model_parallel_size,
        data_parallel_world_size=replicas,
    )
