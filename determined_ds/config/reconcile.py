"""(hyperparameters, DeepSpeed JSON, slots, accelerator) -> ResolvedConfig, or every reason why not.

One room decides: what DeepSpeed is given, down to the last value, and where each of these came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.autofill import Change, disagreements, fill_what_is_known
from determined_ds.config.batch import FACTORS, NAMES, Batch, complete_batch
from determined_ds.config.deepspeed.normalized import AUTO, located_problems, normalized
from determined_ds.config.deepspeed.old_names import old_names
from determined_ds.config.facts import Facts
from determined_ds.config.hyperparameters import (
    LAID_OVER,
    LARGEST,
    OVERWRITES,
    SIZES,
    FitOptions,
    Hyperparameters,
    read_hyperparameters,
)
from determined_ds.config.keys import json_problems
from determined_ds.config.other_names import by_real_names
from determined_ds.config.rules import broken_rules
from determined_ds.config.topology import Topology, resolve_topology
from determined_ds.documents.document import Document, KeyPath, dotted, get_path, plain_copy
from determined_ds.errors import ConfigError, Problem

T = TypeVar("T")
MOST_KNOWN = 1_000  # of what is laid over a DeepSpeed JSON
# Section, its path, and whether it is written to where none is given.
WRITTEN = (
    ("tensorboard", "output_path", True),
    ("csv_monitor", "output_path", True),
    ("flops_profiler", "output_file", False),
)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Facts):
    """All that decides a run.

    Args:
        fit: Arguments of ``Trainer.fit``.
        sdpa_kernel: The attention kernel; None: torch chooses.
        warnings: What is possible, but probably not intended.
        stated: The DeepSpeed JSON with what hyperparameters overwrite, before anything was filled.
        folder: Where DeepSpeed's monitors write; "" where that is not known yet.
    """

    fit: FitOptions
    sdpa_kernel: str | None
    warnings: tuple[Problem, ...]
    stated: Document
    folder: str = ""

    @property
    def ds_config(self) -> dict[str, Any]:
        """The mapping that DeepSpeed is given: plain, complete, and a fresh copy each time."""
        copied: dict[str, Any] = plain_copy(self.ds.data)
        return copied

    def writing_in(self, folder: str) -> ResolvedConfig:
        """The same, with the relative paths of DeepSpeed's monitors and profiler placed in a folder; "" for none."""
        if not folder:
            return self
        changes = []
        for section, key, is_needed in WRITTEN:
            path = self.ds.get((section, key)) or ""
            if self.enabled(section) and (path or is_needed):
                changes.append(((section, key), os.path.join(folder, str(path)), "the run's folder"))
        return replace(self, ds=self.ds.overwritten_all(changes), folder=folder)

    @cached_property
    def origins(self) -> Mapping[str, str]:
        """Dotted key of :attr:`ds_config` -> where its value came from."""
        return {dotted(path): self.ds.origin(path) for path in leaf_paths(self.ds.data)}

    @property
    def filled(self) -> list[KeyPath]:
        """The leaves of :attr:`ds_config` that the JSON and ``overwrite_deepspeed_args`` leave open."""
        return [path for path in leaf_paths(self.ds.data) if self.stated.get(path) in (None, AUTO)]


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
        ConfigError: every reason why it cannot run, each with key, value, origin and fix.
    """
    named = by_real_names(hyperparameters, ds)
    hyperparameters, ds = named.hyperparameters, named.ds
    hp, problems = read_hyperparameters(hyperparameters)
    problems += named.problems
    checked = _laid_over(ds, hyperparameters, hp)
    _tell(checked, problems)
    ds = checked.ds
    refused, ignored = _of_the_table(ds)
    told = {problem.key for problem in problems}
    problems += [problem for problem in refused if problem.key not in told]
    warnings = [*named.warnings, *checked.old, *ignored, *disagreements(ds, hyperparameters)]
    topology = _collect(problems, lambda: _topology(hp, hyperparameters, slots, slots_origin))
    # From here on all is looked at, though it may be known already that nothing will run. Where the replicas
    # cannot be counted, nor the batch, what depends on them is left out.
    layout = topology or _nearest_layout(hp, slots)
    wrong = {problem.key for problem in problems}
    faulty = checked.stripped | {(name,) for name in SIZES if wrong and hyperparameters.key((name,)) in wrong}
    counted = layout.slots == slots and not faulty & {("pipe_parallel_size",), ("model_parallel_size",)}
    batch = None
    if counted and not faulty & {("global_batch_size",), *((key,) for key in BATCH_KEYS)}:
        batch = _collect(problems, lambda: _batch(hp, hyperparameters, ds, layout))
    assumed = batch or _one_sample_each(layout)
    sizes = _batch_sizes(ds, hyperparameters, hp, assumed)
    filled, undetermined = fill_what_is_known(ds, hyperparameters, hp.fit, layout, accelerator, known=sizes)
    problems += undetermined
    checked = _checked(filled, sound=ds.data, in_form=ds.data)
    _tell(checked, problems)
    known: dict[str, Any] = {
        "hyperparameters": hyperparameters,
        "ds": checked.ds,
        "topology": layout,
        "batch": assumed,
        "accelerator": accelerator,
        "machines": machines,
        "torch_compile": hp.torch_compile,
    }
    for rule, problem in broken_rules(Facts(**known), slots_origin=slots_origin):
        if (
            rule.warning and batch is not None
        ):  # of a batch that is only assumed, nothing probable can be said
            warnings.append(problem)
        elif not rule.warning and (counted or "{slots}" not in rule.message):
            problems.append(problem)
    if problems or topology is None or batch is None:
        raise ConfigError(problems, warnings)
    return ResolvedConfig(
        **known, fit=hp.fit, sdpa_kernel=hp.sdpa_kernel, warnings=tuple(warnings), stated=ds
    )


def _of_the_table(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """What the table of keys says of a DeepSpeed JSON; looked up once, for many points of a search."""
    known: tuple[list[Problem], list[Problem]] | None = ds.worked_out.get("keys")
    if known is None:
        known = ds.worked_out["keys"] = json_problems(ds)
    return known


def _collect(problems: list[Problem], step: Callable[[], T]) -> T | None:
    """Run a step; keep its problems and go on, so that the user hears all of them at once."""
    try:
        return step()
    except ConfigError as error:
        problems.extend(error.problems)
        return None


class _Checked(NamedTuple):
    """What remains of a DeepSpeed JSON without its faulty values.

    Args:
        ds: It, normalized.
        found: The problems, and the paths of the values at fault.
        stripped: These paths.
        old: Warnings of keys that have another name today.
    """

    ds: Document
    found: Sequence[tuple[KeyPath, Problem]]
    stripped: frozenset[KeyPath]
    old: Sequence[Problem]


def _checked(ds: Document, *, sound: Mapping[str, Any], in_form: Mapping[str, Any]) -> _Checked:
    """Look at each value of a DeepSpeed JSON but those known to be ``sound`` or, of their form, ``in_form``."""
    found = located_problems(ds, sound=sound)
    stripped = frozenset(path for path, _ in found if path)
    for path in stripped:
        if ds.get(path) is not None:
            ds = ds.without(path)
    return _Checked(normalized(ds, in_form=in_form), found, stripped, tuple(old_names(ds)))


def _as_written(ds: Document) -> _Checked:
    """The same for a DeepSpeed JSON that is read for many points: looked at once."""
    known: _Checked | None = ds.worked_out.get("checked")
    if known is None:
        known = ds.worked_out["checked"] = _checked(ds, sound={}, in_form={})
    return known


def _tell(checked: _Checked, problems: list[Problem]) -> None:
    for _, problem in checked.found:
        if problem not in problems:
            problems.append(problem)


def _nearest_layout(hp: Hyperparameters, slots: int) -> Topology:
    """What the rest can be looked at with, where the slots cannot be laid out as asked."""
    per_replica = hp.pipe_parallel_size * hp.model_parallel_size
    return Topology(
        pipe_parallel_size=hp.pipe_parallel_size,
        model_parallel_size=hp.model_parallel_size,
        data_parallel_world_size=max(1, slots // per_replica),
    )


def _one_sample_each(layout: Topology) -> Batch:
    replicas = layout.data_parallel_world_size
    return Batch(global_batch_size=replicas, micro_batch_size=1, accumulation=1, replicas=replicas)


def _laid_over(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> _Checked:
    """The JSON under what hyperparameters lay over it; of what these leave alone it is known how it is."""
    written = _as_written(ds)
    if not hp.overwrite_deepspeed_args and not hp.laid_over:
        return written
    try:
        said = repr((hp.overwrite_deepspeed_args, hp.laid_over))
    except ValueError:  # an integer of more digits than Python writes out
        return _overwritten(ds, written, hyperparameters, hp)
    # Many points of a search have the same, and the same places: looked at once for all of them.
    known: dict[str, tuple[Document, _Checked]] = ds.worked_out.setdefault("laid over", {})
    if said in known and known[said][0].is_beside(hyperparameters):
        return known[said][1]
    checked = _overwritten(ds, written, hyperparameters, hp)
    if len(known) < MOST_KNOWN:
        known[said] = hyperparameters, checked
    return checked


def _overwritten(ds: Document, written: _Checked, hyperparameters: Document, hp: Hyperparameters) -> _Checked:
    over = _with_overwrites(ds, hyperparameters, hp)
    return _checked(over, sound={} if written.found else ds.data, in_form=written.ds.data)


def _with_overwrites(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> Document:
    """Lay ``overwrite_deepspeed_args`` over the JSON, leaf by leaf, and then what stands for one value of it.

    Source: ``overwrite_deepspeed_config`` in determined 0.38.1's ``pytorch/deepspeed``.
    """
    over = hp.overwrite_deepspeed_args
    laid: list[tuple[KeyPath, Any, str, KeyPath]] = [
        (path, get_path(over, path), OVERWRITES, (OVERWRITES, *path)) for path in leaf_paths(over)
    ]
    laid += [(LAID_OVER[key], value, key, (key,)) for key, value in hp.laid_over.items()]
    changes = []
    for path, value, said, stated in laid:
        origin = hyperparameters.origin(stated)
        if not origin.startswith("--"):
            origin = origin.reworded(f"{said}, {origin}")
        changes.append((path, value, origin))
    return ds.overwritten_all(changes)


def leaf_paths(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value that is not a mapping with something in it."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaf_paths(value, (*path, key))
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
            **{name: document.origin((name,)) for name in SIZES if document.get((name,)) is not None},
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
        if value > LARGEST:
            origin, message = ds.origin((key,)), f"must be at most {LARGEST}"
            problems.append(
                Problem(
                    key=key,
                    value=value,
                    origin=origin,
                    message=message,
                    fix='write a smaller number, or "auto"',
                    code="out-of-range",
                )
            )
            continue
        given[name], origins[name] = value, ds.origin((key,))
    if problems:
        raise ConfigError(problems)
    if hp.global_batch_size is None:
        return complete_batch(**given, origins=origins)
    origin = document.origin(("global_batch_size",))
    other, other_origin = given.get("global_batch_size"), origins.get("global_batch_size", "")
    ours = {**given, "global_batch_size": hp.global_batch_size}
    batch = _collect(
        problems, lambda: complete_batch(**ours, origins={**origins, "global_batch_size": origin})
    )
    if other not in (None, hp.global_batch_size):
        # That the rest does not fit either is news only where it fits neither of the two.
        if batch is None and _collect([], lambda: complete_batch(**given, origins={})) is not None:
            problems.clear()
        problems.insert(0, _stated_twice(document, hp.global_batch_size, origin, other, other_origin))
    if problems or batch is None:
        raise ConfigError(problems)
    return batch


def _stated_twice(
    document: Document, value: int, origin: str, other: int | None, other_origin: str
) -> Problem:
    return Problem(
        key=document.key(("global_batch_size",)),
        value=value,
        origin=origin,
        message=f"differs from train_batch_size = {other} ({other_origin})",
        fix='state it once: write "auto" for train_batch_size, and global_batch_size is used',
        code="batch-twice",
    )


def _batch_sizes(ds: Document, document: Document, hp: Hyperparameters, batch: Batch) -> list[Change]:
    """The batch sizes that the JSON leaves open, with their origins."""
    stated = document.origin(("global_batch_size",))
    changes: list[Change] = []
    for key, name in BATCH_KEYS.items():
        if ds.get((key,)) in (None, AUTO):
            origin = stated.reworded(_derivation(name, batch))
            if name == "global_batch_size" and hp.global_batch_size is not None:
                origin = stated.reworded(f"global_batch_size, {stated}")
            changes.append(((key,), getattr(batch, name), origin))
    return changes


def _derivation(name: str, batch: Batch) -> str:
    factors = " x ".join(f"{NAMES[factor]} {getattr(batch, factor)}" for factor in FACTORS if factor != name)
    if name == "global_batch_size":
        return f"derived: {factors}"
    return f"derived: global_batch_size {batch.global_batch_size} / ({factors})"
