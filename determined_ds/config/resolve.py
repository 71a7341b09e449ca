"""(hyperparameters, DeepSpeed JSON, slots, accelerator) -> ResolvedConfig, or every reason why not.

One room decides, for commands, ranks and a cluster's start-up hook alike: what DeepSpeed is given, down to the last
value, and where each of these came from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from determined_ds.config.ds_schema import Located, located_problems, normalized
from determined_ds.config.fill import disagreements, filled, leaf_paths, overwritten, tensor_parallel_values
from determined_ds.config.keys import json_problems
from determined_ds.config.layout import (
    BATCH_KEYS,
    Accelerator,
    Batch,
    Topology,
    resolve_topology,
    stated_batch,
)
from determined_ds.config.loggers import LOGGING, TOOLS, read_loggers
from determined_ds.config.params import (
    AUTO,
    PARALLEL_SIZES,
    SIZES,
    FitOptions,
    Hyperparameters,
    by_real_names,
    read_hyperparameters,
)
from determined_ds.config.rules import broken_rules
from determined_ds.config.strategy import Strategy, autotp_degree, read_strategy
from determined_ds.documents.document import Document, KeyPath, dotted, nearest, plain_copy
from determined_ds.documents.files import read_json
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

T = TypeVar("T")
MOST_KNOWN = 1_000  # overwrites of a DeepSpeed JSON whose result is kept
# Section, its path, and whether it is written to where none is given.
WRITTEN = (
    ("tensorboard", "output_path", True),
    ("csv_monitor", "output_path", True),
    ("flops_profiler", "output_file", False),
)
# Section -> the module that it imports, and the package that has it. Source: deepspeed 0.19.8 monitor/utils.py.
PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet-ml>=3.41"),
    "tensorboard": ("tensorboard", "tensorboard"),
}


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """All that decides a run.

    Args:
        hyperparameters: All of the point.
        ds: The DeepSpeed JSON with every "auto" filled; each value has its place.
        topology: slots = pipe x model x sequence x data.
        batch: The completed batch.
        accelerator: What the ranks compute on.
        machines: Machines that the slots are spread over.
        torch_compile: Whether engines compile their models by ``torch.compile``.
        fit: Arguments of ``Trainer.fit``.
        sdpa_kernel: The attention kernel; None: torch chooses.
        warnings: What is possible, but probably not intended.
        stated: The DeepSpeed JSON with what hyperparameters overwrite, before anything was filled.
        folder: Where DeepSpeed's monitors write; "" where that is not known yet.
    """

    hyperparameters: Document
    ds: Document
    topology: Topology
    batch: Batch
    accelerator: Accelerator
    machines: int = 1
    torch_compile: bool = False
    fit: FitOptions
    sdpa_kernel: str | None
    warnings: tuple[Problem, ...]
    stated: Document
    folder: str = ""

    @cached_property
    def strategy(self) -> Strategy:
        """How it is carried out: ZeRO stage, offload, precision, activation checkpointing, pipeline, compilers."""
        return read_strategy(
            self.ds.data,
            self.topology,
            self.batch,
            hyperparameters=self.hyperparameters.data,
            torch_compile=self.torch_compile,
        )

    @property
    def zero_stage(self) -> int:
        """``zero_optimization.stage``."""
        return self.strategy.zero_stage

    @property
    def ds_config(self) -> dict[str, Any]:
        """The mapping that DeepSpeed is given: plain, complete, and a fresh copy each time."""
        copied: dict[str, Any] = plain_copy(self.ds.data)
        return copied

    @cached_property
    def origins(self) -> Mapping[str, str]:
        """Dotted key of :attr:`ds_config` -> where its value came from."""
        return {dotted(path): self.ds.origin(path) for path in leaf_paths(self.ds.data)}

    @property
    def filled(self) -> list[KeyPath]:
        """The leaves of :attr:`ds_config` that the JSON and ``overwrite_deepspeed_args`` leave open."""
        return [path for path in leaf_paths(self.ds.data) if self.stated.get(path) in (None, AUTO)]

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
            if self.ds.get((section, "enabled")) and (path or is_needed):
                changes.append(((section, key), os.path.join(folder, str(path)), "the run's folder"))
        return replace(self, ds=self.ds.overwritten_all(changes), folder=folder)

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
    hyperparameters, misnamed, renamed = by_real_names(hyperparameters)
    hp, problems = read_hyperparameters(hyperparameters)
    problems += misnamed
    written = _overwritten(ds, hyperparameters, hp)
    ds = written.ds
    _add(problems, (problem for _, problem in written.found))
    if "keys" not in ds.worked_out:  # looked up once for all points
        ds.worked_out["keys"] = json_problems(ds)
    refused, ignored = ds.worked_out["keys"]
    doubled, monitors = _monitor_problems(ds, hp.logging)
    keys = {problem.key for problem in problems}
    problems += [problem for problem in (*refused, *doubled) if problem.key not in keys]
    warnings = [*renamed, *ignored, *monitors, *disagreements(ds, hyperparameters)]

    # All of the rest is checked too, to report every problem at once. What depends on replicas or on a batch that
    # could not be counted is left out.
    sizes = {name: getattr(hp, name) for name in PARALLEL_SIZES}
    if hyperparameters.get(("model_parallel_size",)) in (None, AUTO):
        sizes["model_parallel_size"] = autotp_degree(ds.data)
    stated = {
        name: hyperparameters.origin((name,)) for name in SIZES if hyperparameters.get((name,)) is not None
    }
    topology = _collect(
        problems,
        lambda: resolve_topology(
            slots=slots,
            **sizes,
            data_parallel_world_size=hp.data_parallel_world_size,
            pipe_within_machine=hp.pipe_within_machine,
            origins={"slots": slots_origin, **stated},
        ),
    )
    nearby = Topology(**sizes, data_parallel_world_size=max(1, slots // math.prod(sizes.values())))
    layout = topology or nearby
    wrong = {problem.key for problem in problems}
    faulty = written.stripped | {(name,) for name in SIZES if wrong and hyperparameters.key((name,)) in wrong}
    for (
        problem
    ) in problems:  # the size that an unknown key was probably meant to be is absent by the same mistake
        if problem.code == "unknown-key" and (size := nearest(problem.key.rpartition(".")[2], SIZES)):
            faulty |= {(size,)} if hyperparameters.get((size,)) is None else set()
    counted = layout.slots == slots and not faulty & {(name,) for name in PARALLEL_SIZES}
    batch = None
    if counted and not faulty & {("global_batch_size",), *((key,) for key in BATCH_KEYS)}:
        batch = _collect(problems, lambda: stated_batch(hp, hyperparameters, ds, layout))
    replicas = layout.data_parallel_world_size
    assumed = Batch(global_batch_size=replicas, micro_batch_size=1, accumulation=1, replicas=replicas)

    full, undetermined = filled(ds, hyperparameters, hp.fit, layout, batch or assumed, accelerator)
    problems += undetermined
    checked = _checked(full, sound=ds.data)
    # A hyperparameter at fault is named itself, and not what it fills.
    blamed = {problem.key for problem in problems}
    filled_by = ((problem.origin.partition(",")[0], problem) for _, problem in checked.found)
    _add(problems, (found for name, found in filled_by if hyperparameters.key((name,)) not in blamed))
    resolved = ResolvedConfig(
        hyperparameters=hyperparameters,
        ds=checked.ds,
        topology=layout,
        batch=batch or assumed,
        accelerator=accelerator,
        machines=machines,
        torch_compile=hp.torch_compile,
        fit=hp.fit,
        sdpa_kernel=hp.sdpa_kernel,
        warnings=(),
        stated=ds,
    )
    for rule, problem in broken_rules(resolved, slots_origin=slots_origin):
        if rule.warning and batch is not None:  # an assumed batch supports no warning
            warnings.append(problem)
        elif not rule.warning and (counted or not rule.counts_slots):
            problems.append(problem)
    if problems or topology is None or batch is None:
        raise ConfigError(problems, warnings)
    return replace(resolved, warnings=tuple(warnings))


def _add(problems: list[Problem], more: Iterable[Problem]) -> None:
    problems.extend(problem for problem in more if problem not in problems)


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
    """

    ds: Document
    found: Located
    stripped: frozenset[KeyPath]


def _checked(ds: Document, *, sound: Mapping[str, Any], in_form: Mapping[str, Any] | None = None) -> _Checked:
    """Check each value of a DeepSpeed JSON, except those known to be ``sound``, or in normal form already."""
    found = located_problems(ds, sound=sound)
    stripped = frozenset(path for path, _ in found if path)
    for path in stripped:
        if ds.get(path, NOT_GIVEN) is not NOT_GIVEN:  # null is a value, too
            ds = ds.without(path)
    in_form = sound if in_form is None else in_form
    return _Checked(normalized(ds, in_form=in_form), found, stripped)


def _overwritten(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> _Checked:
    """The JSON with what hyperparameters overwrite in it, checked; what they leave alone is checked once."""
    if "checked" not in ds.worked_out:
        ds.worked_out["checked"] = _checked(ds, sound={})
    written: _Checked = ds.worked_out["checked"]
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
    over = overwritten(ds, hyperparameters, hp)
    checked = _checked(over, sound={} if written.found else ds.data, in_form=written.ds.data)
    if stated and len(known) < MOST_KNOWN:
        known[stated] = hyperparameters, checked
    return checked


def _monitor_problems(ds: Document, tools: Mapping[str, Any]) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings of DeepSpeed's own monitors, beside the tools of ``hyperparameters.logging``."""
    refused, warned = [], []
    secret = ("comet", "api_key")
    if ds.get(secret) is not None:
        message = "is a secret, which would be written to the run's files"
        fix = "remove it, and set COMET_API_KEY in the environment; a key that others have seen should be revoked"
        refused.append(ds.problem(secret, message, fix, "logger-secret", value="***"))
    # Source: deepspeed 0.19.8 monitor/wandb.py: each start of the ranks opens a run, whose steps are samples.
    path = ("wandb", "enabled")
    if ds.get(path) is True and "wandb" in tools:
        message = f"hyperparameters.{LOGGING}.wandb reports the run to Weights & Biases too: it would be there twice"
        refused.append(ds.problem(path, message, "remove the section wandb", "reported-twice"))
    elif ds.get(path) is True:
        message = (
            "has DeepSpeed open a run of its own in Weights & Biases at every start, without validations, whose steps"
            " are samples"
        )
        fix = f"write hyperparameters.{LOGGING}: {{wandb: {{}}}} instead, which continues one run"
        warned.append(ds.problem(path, message, fix, "monitor"))
    return refused, warned


def missing_packages(ds: Document | None, hyperparameters: Document | None = None) -> list[Problem]:
    """A problem for each package that is asked for, that neither we nor DeepSpeed bring, and that is not here.

    Args:
        ds: The DeepSpeed JSON, if it is known.
        hyperparameters: One point, for its tools of ``logging``.
    """
    needed: list[tuple[Document, KeyPath, str, str, str]] = []
    if ds is not None:
        needed = [
            (ds, (section, "enabled"), module, package, "write false")
            for section, (module, package) in PACKAGES.items()
            if ds.get((section, "enabled")) is True
        ]
        # Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer.
        if str(ds.get(("optimizer", "type"))).lower() in ("muadam", "muadamw", "musgd"):
            needed.append((ds, ("optimizer", "type"), "mup", "mup", "use AdamW"))
    if hyperparameters is not None:
        needed += [
            (hyperparameters, (LOGGING, name), TOOLS[name].module, TOOLS[name].package, "remove it")
            for name in read_loggers(hyperparameters, [])
        ]
    return [
        document.problem(
            path,
            f"needs the package {package}, which is not installed on this machine",
            f"pip install '{package}' (on a cluster: in environment.image, or in startup-hook.sh), or {instead}",
            "missing-package",
            value=NOT_GIVEN if document is hyperparameters else document.get(path),
        )
        for document, path, module, package, instead in needed
        if find_spec(module) is None
    ]


# ------------------------------------------------------------------------------------------- where points train


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where points train. DeepSpeed JSONs are read once for all points.

    Args:
        context_dir: The folder that paths of DeepSpeed JSONs are relative to.
        accelerator: What the ranks compute on.
        slots: Ranks in all, >= 1; None: as the experiment says.
        slots_origin: Where ``slots`` was stated.
        machines: Machines that the slots are spread over.
    """

    context_dir: Path
    accelerator: Accelerator
    slots: int | None = None
    slots_origin: str = ""
    machines: int = 1

    @cached_property
    def _read(self) -> dict[str | int, tuple[Any, Document | tuple[Problem, ...]]]:
        return {}

    def deepspeed_json(self, hyperparameters: Document) -> Document:
        """The DeepSpeed JSON of a point, as written.

        Raises:
            ConfigError: it cannot be read.
        """
        value = hyperparameters.get(("deepspeed_config",))
        key = value if isinstance(value, str) else id(value)
        if key not in self._read:
            try:
                found: Document | tuple[Problem, ...] = find_deepspeed_config(
                    hyperparameters, self.context_dir
                )
            except ConfigError as error:
                found = error.problems
            self._read[key] = (value, found)  # the value is kept, so that its id stays its own
        _, found = self._read[key]
        if isinstance(found, Document):
            return found
        raise ConfigError(found)


def resolve(hyperparameters: Document, where: Where) -> ResolvedConfig:
    """What one point runs with.

    Args:
        hyperparameters: One point of the search space.
        where: Where it trains; its slots are known.

    Raises:
        ConfigError: every reason why it cannot run.
    """
    assert where.slots is not None
    try:
        ds = where.deepspeed_json(hyperparameters)
    except ConfigError as error:
        raise ConfigError([*error.problems, *read_hyperparameters(hyperparameters)[1]]) from None
    return reconcile(
        hyperparameters,
        ds,
        slots=where.slots,
        accelerator=where.accelerator,
        slots_origin=where.slots_origin,
        machines=where.machines,
    )


def find_deepspeed_config(hyperparameters: Document, context_dir: Path) -> Document:
    """The DeepSpeed JSON that ``hyperparameters.deepspeed_config`` names or holds; an empty one where it does neither.

    Args:
        hyperparameters: One point.
        context_dir: The directory that Determined sends to the cluster; paths are relative to it.

    Raises:
        ConfigError: the path leaves the context directory, or the file cannot be read.
    """
    inner: KeyPath = ("deepspeed_config",)
    value = hyperparameters.get(inner)
    if isinstance(value, dict):
        sub = hyperparameters.sub(inner)
        return Document(name=sub.name, data=value, places=sub.places, overwrites=sub.overwrites)
    if not isinstance(value, str):
        return Document(name="no deepspeed_config", data={})
    relative = "give a path relative to the context directory"
    message, fix = "", relative
    try:
        root = context_dir.resolve()
        target = (root / value).resolve()
        if not target.is_relative_to(root):
            message = "lies outside the context directory, so a cluster would not get it"
            fix = f"move it inside, and {relative}"
        elif not target.is_file():
            message = "is not a file" if target.exists() else "no such file in the context directory"
            folder = next((p for p in target.parents if p.is_dir() and p.is_relative_to(root)), root)
            names = sorted(str(p.relative_to(root)) for p in folder.glob("*.json"))
            fix = f"there are: {', '.join(names[:12])}" if names else relative
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte in it, links in a circle
        message = f"is not a valid path: {getattr(error, 'strerror', None) or error}"
    if message:
        raise ConfigError(hyperparameters.problem(inner, message, fix, "deepspeed-config-path"))
    return read_json(context_dir / value)
