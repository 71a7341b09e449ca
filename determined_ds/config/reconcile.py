"""(hyperparameters, DeepSpeed JSON, slots, accelerator) -> ResolvedConfig, or every reason why not.

One room decides: what DeepSpeed is given, down to the last value, and where each of these came from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.autofill import fill_autos
from determined_ds.config.batch import NAMES, Batch, complete_batch
from determined_ds.config.deepspeed_json import AUTO, key_problems
from determined_ds.config.document import Document, dotted
from determined_ds.config.hyperparameters import LARGEST, FitOptions, Hyperparameters, parse_hyperparameters
from determined_ds.config.rules import Facts, broken_rules
from determined_ds.config.topology import Topology, resolve_topology
from determined_ds.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """All that a run is decided by.

    Args:
        topology: slots = pipe x model x data.
        batch: The completed batch.
        fit: Arguments of ``Trainer.fit``.
        accelerator: What the ranks compute on.
        origins: Dotted key of :attr:`ds_config` -> where its value came from.
        warnings: What is possible, but probably not meant so.
    """

    topology: Topology
    batch: Batch
    fit: FitOptions
    accelerator: Accelerator
    origins: Mapping[str, str]
    warnings: tuple[Problem, ...]
    _ds_config: dict[str, Any]

    @property
    def ds_config(self) -> dict[str, Any]:
        """The very mapping DeepSpeed is given: plain, complete, and a fresh copy each time."""
        return copy.deepcopy(self._ds_config)

    @property
    def zero_stage(self) -> int:
        return int(self._ds_config.get("zero_optimization", {}).get("stage", 0))


def reconcile(
    hyperparameters: Document,
    ds: Document,
    *,
    slots: int,
    accelerator: Accelerator,
    slots_origin: str = "",
    machines: int = 1,
) -> ResolvedConfig:
    """Decide what will run.

    Args:
        hyperparameters: One point of the search space.
        ds: The DeepSpeed JSON as written; ``"auto"`` and absent values are filled.
        slots: Ranks in all, >= 1.
        accelerator: What the ranks compute on.
        slots_origin: Where ``slots`` was stated.
        machines: Machines that the slots are spread over.

    Raises:
        ConfigError: every reason why it cannot run, each with key, value, origin and mend.
    """
    problems: list[Problem] = []
    hp = _collect(problems, lambda: parse_hyperparameters(hyperparameters)) or Hyperparameters()
    if hp.overwrite_deepspeed_args:
        ds = _with_overwrites(ds, hyperparameters, hp.overwrite_deepspeed_args)
    problems += key_problems(ds)
    topology = _collect(problems, lambda: _topology(hp, hyperparameters, slots, slots_origin))
    if problems or topology is None:
        raise ConfigError(problems)
    batch = _collect(problems, lambda: _batch(hp, hyperparameters, ds, topology))
    if batch is None:
        raise ConfigError(problems)
    filled = _collect(problems, lambda: _fill(ds, hyperparameters, hp, topology, batch, accelerator))
    warnings: list[Problem] = []
    if filled is not None:
        facts = Facts(
            ds=filled, topology=topology, batch=batch, accelerator=accelerator, machines=machines
        )
        for rule, problem in broken_rules(facts, slots_origin=slots_origin):
            (warnings if rule.warning else problems).append(problem)
    if problems or filled is None:
        raise ConfigError(problems)
    return ResolvedConfig(
        topology=topology,
        batch=batch,
        fit=hp.fit,
        accelerator=accelerator,
        origins={dotted(path): filled.origin(path) for path in _leaf_paths(filled.data)},
        warnings=tuple(warnings),
        _ds_config=copy.deepcopy(filled.data),
    )


def _collect(problems: list[Problem], step: Callable[[], T]) -> T | None:
    """Run a step; keep its problems and go on, so that the user hears all of them at once."""
    try:
        return step()
    except ConfigError as error:
        problems.extend(error.problems)
        return None


def _with_overwrites(ds: Document, hyperparameters: Document, overwrites: dict[str, Any]) -> Document:
    """Lay ``overwrite_deepspeed_args`` over the JSON, leaf by leaf.

    Source: ``overwrite_deepspeed_config`` in determined 0.38.1's ``pytorch/deepspeed``.
    """
    for path in _leaf_paths(overwrites):
        value: Any = overwrites
        for step in path:
            value = value[step]
        origin = hyperparameters.origin(("overwrite_deepspeed_args", *path))
        if not origin.startswith("--"):
            origin = f"overwrite_deepspeed_args, {origin}"
        ds = ds.overwritten(path, value, origin)
    return ds


def _leaf_paths(data: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaf_paths(value, (*path, key))
        else:
            yield (*path, key)


def _topology(hp: Hyperparameters, document: Document, slots: int, slots_origin: str) -> Topology:
    return resolve_topology(
        slots=slots,
        pipe_parallel_size=hp.pipe_parallel_size,
        model_parallel_size=hp.model_parallel_size,
        data_parallel_world_size=hp.data_parallel_world_size,
        origins={
            "slots": slots_origin,
            "data_parallel_world_size": document.origin(("data_parallel_world_size",)),
        },
    )


BATCH_KEYS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation",
}


def _batch(hp: Hyperparameters, document: Document, ds: Document, topology: Topology) -> Batch:
    given: dict[str, int] = {"replicas": topology.data_parallel_world_size}
    origins = {"replicas": f"{topology.slots} slots"}
    problems: list[Problem] = []
    for key, name in BATCH_KEYS.items():
        value = ds.get((key,))
        if value is None or value == AUTO:
            continue
        if not 1 <= value <= LARGEST:
            mend = 'write a positive number, or "auto"' if value < 1 else "write a smaller number"
            origin, message = ds.origin((key,)), f"must be between 1 and {LARGEST}"
            problems.append(
                Problem(key=key, value=value, origin=origin, message=message, mend=mend, code="out-of-range")
            )
            continue
        given[name], origins[name] = int(value), ds.origin((key,))
    if hp.global_batch_size is not None:
        origin = document.origin(("global_batch_size",))
        stated = given.get("global_batch_size", hp.global_batch_size)
        if stated != hp.global_batch_size:
            problems.append(
                Problem(
                    key="hyperparameters.global_batch_size",
                    value=hp.global_batch_size,
                    origin=origin,
                    message=f"differs from train_batch_size = {stated} ({origins['global_batch_size']})",
                    mend='state it once: set train_batch_size to "auto" in the DeepSpeed JSON',
                    code="batch-twice",
                )
            )
        given["global_batch_size"], origins["global_batch_size"] = hp.global_batch_size, origin
    if problems:
        raise ConfigError(problems)
    return complete_batch(**given, origins=origins)


def _fill(
    ds: Document,
    document: Document,
    hp: Hyperparameters,
    topology: Topology,
    batch: Batch,
    accelerator: Accelerator,
) -> Document:
    for key, name in BATCH_KEYS.items():
        if ds.get((key,)) in (None, AUTO):
            stated = name == "global_batch_size" and hp.global_batch_size is not None
            origin = (
                f"global_batch_size, {document.origin(('global_batch_size',))}"
                if stated
                else "derived: " + " x ".join(f"{NAMES[n]} {getattr(batch, n)}" for n in NAMES if n != name)
            )
            ds = ds.overwritten((key,), getattr(batch, name), origin)
    return fill_autos(ds, document, hp.fit, topology, accelerator)
