"""(hyperparameters, DeepSpeed JSON, slots, accelerator) -> ResolvedConfig, or every reason why not.

One room decides: what DeepSpeed is given, down to the last value, and where each of these came from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.autoep import expert_parallel_values
from determined_ds.config.autofill import disagreements, fill_what_is_known
from determined_ds.config.autotp import tensor_parallel_values, with_degree
from determined_ds.config.batch import (
    BATCH_KEYS,
    Batch,
    one_sample_each,
    open_degree,
    open_sizes,
    stated_batch,
)
from determined_ds.config.deepspeed.instruments import switched_on, without_instruments
from determined_ds.config.deepspeed.monitors import monitor_problems
from determined_ds.config.deepspeed.normalized import located_problems, normalized
from determined_ds.config.deepspeed.old_names import old_names
from determined_ds.config.facts import Facts
from determined_ds.config.fit_options import FitOptions
from determined_ds.config.hyperparameters import (
    OVERWRITES,
    PARALLEL_SIZES,
    SHORTHANDS,
    SIZES,
    Hyperparameters,
    read_hyperparameters,
)
from determined_ds.config.keys import json_problems
from determined_ds.config.numbers import AUTO
from determined_ds.config.other_names import by_real_names
from determined_ds.config.rules import broken_rules
from determined_ds.config.topology import Topology, resolve_topology
from determined_ds.documents.document import Document, KeyPath, dotted, get_path, nearest, plain_copy
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

T = TypeVar("T")
# Sections of the DeepSpeed JSON that a trial may build itself.
REMOVABLE: tuple[KeyPath, ...] = (("scheduler",), ("optimizer",))
MOST_KNOWN = 1_000  # overwrites of a DeepSpeed JSON whose result is kept
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

    @property
    def initial_ds_config(self) -> dict[str, Any]:
        """The same without what the loop switches on itself, for which DeepSpeed would print as it is initialized."""
        return without_instruments(self.ds_config, self.switched_on)

    def writing_in(self, folder: str) -> ResolvedConfig:
        """The same, with the relative paths of DeepSpeed's monitors and profiler placed in a folder.

        Args:
            folder: The run's folder for TensorBoard; "" changes nothing.

        Returns:
            A new configuration, or this one.
        """
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

    def with_tensor_parallel(self) -> ResolvedConfig:
        """The same, with the section ``tensor_parallel`` that carries out ``model_parallel_size``.

        Returns:
            A new configuration; this one where nothing is left open.
        """
        topology = self.topology
        if topology.model_parallel_size == 1 or topology.pipe_parallel_size > 1:
            return self
        changes = tensor_parallel_values(self.ds, topology.model_parallel_size, everywhere=True)
        return replace(self, ds=self.ds.overwritten_all(changes)) if changes else self

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

    Returns:
        The configuration: what DeepSpeed is given, the topology, the batch, warnings.

    Raises:
        ConfigError: every reason why it cannot run, each with key, value, origin and fix.
    """
    named = by_real_names(hyperparameters, ds)
    hyperparameters = named.hyperparameters
    hp, problems = read_hyperparameters(hyperparameters)
    problems += named.problems
    written = _overwritten(named.ds, hyperparameters, hp)
    ds, hp = written.ds, with_degree(hp, hyperparameters, written.ds)
    refused, ignored = _of_the_table(ds)
    doubled, monitors = monitor_problems(ds, hp.logging)
    _add(problems, (problem for _, problem in written.found))
    keys = {problem.key for problem in problems}
    problems += [problem for problem in (*refused, *doubled) if problem.key not in keys]
    warnings = [*named.warnings, *written.old, *ignored, *monitors, *disagreements(ds, hyperparameters)]
    topology = _collect(problems, lambda: _topology(hp, hyperparameters, slots, slots_origin))
    # All of the rest is checked too, to report every problem at once. What depends on replicas or on a batch that
    # could not be counted is left out.
    layout = topology or _nearest_layout(hp, slots)
    wrong = {problem.key for problem in problems}
    faulty = written.stripped | {(name,) for name in SIZES if wrong and hyperparameters.key((name,)) in wrong}
    faulty |= {(name,) for name in _misspelt_sizes(problems) if hyperparameters.get((name,)) is None}
    counted = layout.slots == slots and not faulty & {(name,) for name in PARALLEL_SIZES}
    batch = None
    if counted and not faulty & {("global_batch_size",), *((key,) for key in BATCH_KEYS)}:
        batch = _collect(problems, lambda: stated_batch(hp, hyperparameters, ds, layout))
    known = _filled(problems, hp, hyperparameters, ds, layout, batch or one_sample_each(layout), accelerator)
    known["machines"] = machines
    for rule, problem in broken_rules(Facts(**known), slots_origin=slots_origin):
        if rule.warning and batch is not None:  # an assumed batch supports no warning
            warnings.append(problem)
        elif not rule.warning and (counted or "{slots}" not in rule.message):
            problems.append(problem)
    if problems or topology is None or batch is None:
        raise ConfigError(problems, warnings)
    return ResolvedConfig(
        **known, fit=hp.fit, sdpa_kernel=hp.sdpa_kernel, warnings=tuple(warnings), stated=ds
    )


def _misspelt_sizes(problems: Iterable[Problem]) -> set[str]:
    """The sizes that an unknown key was probably meant to be; their absence is the same mistake."""
    unknown = (problem.key.rpartition(".")[2] for problem in problems if problem.code == "unknown-key")
    return {size for key in unknown if (size := nearest(key, SIZES))}


def _filled(
    problems: list[Problem],
    hp: Hyperparameters,
    hyperparameters: Document,
    ds: Document,
    layout: Topology,
    batch: Batch,
    accelerator: Accelerator,
) -> dict[str, Any]:
    """The arguments of :class:`Facts`, with every "auto" of the JSON filled; adds the problems of doing so."""
    sizes = [
        *open_sizes(ds, hyperparameters, batch),
        *open_degree(ds, hyperparameters, layout),
        *tensor_parallel_values(ds, layout.model_parallel_size),
        *expert_parallel_values(ds, hyperparameters),
    ]
    filled, undetermined = fill_what_is_known(ds, hyperparameters, hp.fit, layout, accelerator, known=sizes)
    problems += undetermined
    checked = _checked(filled, sound=ds.data, in_form=ds.data)
    _add(problems, (problem for _, problem in checked.found))
    return {
        "hyperparameters": hyperparameters,
        "ds": checked.ds,
        "topology": layout,
        "batch": batch,
        "accelerator": accelerator,
        "torch_compile": hp.torch_compile,
        "switched_on": switched_on(ds, hyperparameters),
    }


def _add(problems: list[Problem], more: Iterable[Problem]) -> None:
    problems.extend(problem for problem in more if problem not in problems)


def _of_the_table(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """The keys of a DeepSpeed JSON that are refused or ignored; looked up once for all points."""
    known: tuple[list[Problem], list[Problem]] | None = ds.worked_out.get("keys")
    if known is None:
        known = ds.worked_out["keys"] = json_problems(ds)
    return known


def _collect(problems: list[Problem], step: Callable[[], T]) -> T | None:
    """Run a step and keep its problems, so that all of them are reported at once."""
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
        old: Warnings of keys that have a new name.
    """

    ds: Document
    found: Sequence[tuple[KeyPath, Problem]]
    stripped: frozenset[KeyPath]
    old: Sequence[Problem]


def _checked(ds: Document, *, sound: Mapping[str, Any], in_form: Mapping[str, Any]) -> _Checked:
    """Check each value of a DeepSpeed JSON, except those known to be ``sound`` or in normal form already."""
    found = located_problems(ds, sound=sound)
    stripped = frozenset(path for path, _ in found if path)
    for path in stripped:
        if ds.get(path) is not None:
            ds = ds.without(path)
    return _Checked(normalized(ds, in_form=in_form), found, stripped, tuple(old_names(ds)))


def _as_written(ds: Document) -> _Checked:
    """The same for a DeepSpeed JSON as it was read: checked once for all points."""
    known: _Checked | None = ds.worked_out.get("checked")
    if known is None:
        known = ds.worked_out["checked"] = _checked(ds, sound={}, in_form={})
    return known


def _nearest_layout(hp: Hyperparameters, slots: int) -> Topology:
    """A layout to check the rest with, where the slots cannot be divided as stated."""
    sizes = {name: getattr(hp, name) for name in PARALLEL_SIZES}
    return Topology(**sizes, data_parallel_world_size=max(1, slots // math.prod(sizes.values())))


def _overwritten(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> _Checked:
    """The JSON with what hyperparameters overwrite in it, checked; what they leave alone is checked once."""
    written = _as_written(ds)
    if not hp.overwrite_deepspeed_args and not hp.shorthands:
        return written
    try:
        stated = repr((hp.overwrite_deepspeed_args, hp.shorthands))
    except ValueError:  # an integer of more digits than Python writes out
        stated = ""
    # Many points of a search state the same at the same places: checked once for all of them.
    known: dict[str, tuple[Document, _Checked]] = ds.worked_out.setdefault("overwritten", {})
    if stated in known and known[stated][0].is_beside(hyperparameters):
        return known[stated][1]
    over = _with_overwrites(ds, hyperparameters, hp)
    checked = _checked(over, sound={} if written.found else ds.data, in_form=written.ds.data)
    if stated and len(known) < MOST_KNOWN:
        known[stated] = hyperparameters, checked
    return checked


def _with_overwrites(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> Document:
    """Overwrite the JSON by ``overwrite_deepspeed_args``, leaf by leaf, and by the shorthands.

    Null in place of a section of :data:`REMOVABLE` removes it.

    Source: ``overwrite_deepspeed_config`` in determined 0.38.1's ``pytorch/deepspeed``.
    """
    over = hp.overwrite_deepspeed_args
    stated: list[tuple[KeyPath, Any, KeyPath]] = [
        (path, get_path(over, path), (OVERWRITES, *path)) for path in leaf_paths(over)
    ]
    stated += [(SHORTHANDS[key], value, (key,)) for key, value in hp.shorthands.items()]
    changes = []
    for path, value, place in stated:
        origin = hyperparameters.origin(place)
        if not origin.startswith("--"):
            origin = origin.reworded(f"{place[0]}, {origin}")
        if value is None and path in REMOVABLE:
            if ds.get(path) is None:
                continue
            value = NOT_GIVEN
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
        **{name: getattr(hp, name) for name in PARALLEL_SIZES},
        data_parallel_world_size=hp.data_parallel_world_size,
        pipe_within_machine=hp.pipe_within_machine,
        origins={
            "slots": slots_origin,
            **{name: document.origin((name,)) for name in SIZES if document.get((name,)) is not None},
        },
    )
