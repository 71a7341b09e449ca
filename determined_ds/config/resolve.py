"""(hyperparameters, DeepSpeed JSON, slots, accelerator) -> ResolvedConfig, or every reason why not.

One room decides, for commands, ranks and a cluster's start-up hook alike: what DeepSpeed is given, down to the last
value, and where each of these came from. The way of a value::

    hyperparameters by their real names -> Hyperparameters                                            params.py
    the JSON, and what hyperparameters write over it -> judged, in normal form: what is *stated*      fill.py
    slots and sizes -> Topology, Batch                                                                layout.py
    "auto" and what is absent -> filled, and judged in the same way                                   fill.py
    the whole, with its Strategy -> held to the compatibility table                                   rules.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from determined_ds.config.ds_schema import ZERO, located_problems, normalized
from determined_ds.config.fill import (
    batch_sizes,
    disagreements,
    fills,
    overwrites,
    tensor_parallel_values,
)
from determined_ds.config.keys import json_problems
from determined_ds.config.layout import (
    BATCH_KEYS,
    Accelerator,
    Batch,
    Topology,
    stated_batch,
    topology_problem,
)
from determined_ds.config.params import (
    AUTO,
    LOGGING,
    PARALLEL_SIZES,
    SIZES,
    TOOLS,
    TOTAL,
    FitOptions,
    by_real_names,
    read_hyperparameters,
    read_loggers,
)
from determined_ds.config.rules import OF_SLOTS, broken_rules
from determined_ds.config.strategy import Strategy, autotp_degree, read_strategy
from determined_ds.documents.document import Change, Document, KeyPath, dotted, leaves, nearest
from determined_ds.documents.files import read_json
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

# Section, its path, and whether it is written to where none is given.
WRITTEN = (
    ("tensorboard", "output_path", True),
    ("csv_monitor", "output_path", True),
    ("flops_profiler", "output_file", False),
)


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
    warnings: tuple[Problem, ...]
    stated: Document
    folder: str = ""

    @cached_property
    def strategy(self) -> Strategy:
        """How it is carried out: ZeRO stage, offload, precision, activation checkpointing, pipeline, compilers."""
        return read_strategy(self)

    @property
    def zero_stage(self) -> int:
        """``zero_optimization.stage``."""
        return self.strategy.zero_stage

    @property
    def ds_config(self) -> dict[str, Any]:
        """The mapping that DeepSpeed is given: plain, complete, and a fresh copy each time."""
        copied: dict[str, Any] = as_plain(self.ds.data)
        return copied

    @cached_property
    def origins(self) -> Mapping[str, str]:
        """Dotted key of :attr:`ds_config` -> where its value came from."""
        return {dotted(path): self.ds.origin(path) for path, _ in leaves(self.ds.data)}

    @property
    def filled(self) -> list[KeyPath]:
        """The leaves of :attr:`ds_config` that the JSON and ``overwrite_deepspeed_args`` leave open."""
        return [path for path, _ in leaves(self.ds.data) if self.stated.get(path) in (None, AUTO)]

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
        return replace(self, ds=self.ds.overwritten(*changes), folder=folder)

    def completed(
        self, hyperparameters: Mapping[str, Any], ds_config_path: Path | None = None
    ) -> dict[str, Any]:
        """Hyperparameters with the derived ones filled in, as ``args`` for ``deepspeed.initialize``.

        Args:
            hyperparameters: As stated.
            ds_config_path: Of the JSON that DeepSpeed is given, for ``deepspeed_config``; None leaves that as stated.
        """
        layout, batch = self.topology, self.batch
        return {
            **hyperparameters,
            "global_batch_size": batch.global_batch_size,
            "data_parallel_world_size": layout.data_parallel_world_size,
            **{name: getattr(layout, name) for name in PARALLEL_SIZES},
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
            **({} if ds_config_path is None else {"deepspeed_config": str(ds_config_path)}),
        }

    def with_tensor_parallel(self) -> ResolvedConfig:
        """The same, with the section ``tensor_parallel`` that carries out ``model_parallel_size``.

        Returns:
            A new configuration; this one where nothing is left open.
        """
        size = self.topology.model_parallel_size
        if size == 1 or self.topology.pipe_parallel_size > 1:
            return self
        changes = tensor_parallel_values(self.ds, size, everywhere=True)
        return replace(self, ds=self.ds.overwritten(*changes)) if changes else self


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
    stated, faults = _judged(ds, overwrites(ds, hyperparameters, hp))
    refused, ignored = json_problems(stated)
    problems += [*misnamed, *faults]
    blamed = {problem.key for problem in problems}
    problems += [problem for problem in refused if problem.key not in blamed]
    warnings = [*renamed, *ignored, *disagreements(stated, hyperparameters)]

    sizes = {name: getattr(hp, name) for name in PARALLEL_SIZES}
    if hyperparameters.get(("model_parallel_size",)) in (None, AUTO):
        sizes["model_parallel_size"] = autotp_degree(stated.data)
    replicas = max(1, slots // math.prod(sizes.values()))
    layout = Topology(**sizes, data_parallel_world_size=replicas, pipe_within_machine=hp.pipe_within_machine)
    # Where sizes are at fault themselves, nothing is said of what follows from them; all else is, of a batch of one
    # sample a replica.
    at_fault = {
        nearest(name, SIZES) if problem.code == "unknown-key" else name
        for problem in problems
        for name in [problem.key.rpartition(".")[2]]
    }
    counted, batch = not at_fault & {*SIZES, *BATCH_KEYS}, None
    assumed = Batch(global_batch_size=replicas, micro_batch_size=1, accumulation=1, replicas=replicas)
    if counted:
        wrong = topology_problem(layout, slots, hp.data_parallel_world_size, hyperparameters, slots_origin)
        problems += [wrong] if wrong else []
        counted = layout.slots == slots
    if counted:
        try:
            batch = stated_batch(hp.global_batch_size, hyperparameters, stated, layout)
        except ConfigError as error:
            problems += error.problems
    c = ResolvedConfig(
        hyperparameters=hyperparameters,
        ds=stated,
        topology=layout,
        batch=batch or assumed,
        accelerator=accelerator,
        machines=machines,
        torch_compile=hp.torch_compile,
        fit=hp.fit,
        warnings=(),
        stated=stated,
    )

    def whole(full: Document, warnings: list[Problem]) -> ResolvedConfig:
        place, is_stated = hyperparameters.origin((TOTAL,)), hp.global_batch_size is not None
        sizes = batch_sizes(full, c.batch, place, is_stated=is_stated)
        return replace(c, ds=full.overwritten(*sizes), warnings=tuple(warnings))

    changes, undetermined = fills(c)
    full, faults = _judged(stated, changes)
    blamed = {problem.key for problem in problems}
    problems += undetermined
    for problem in faults:  # a hyperparameter at fault is named itself, and not what it fills
        filled_by = hyperparameters.key((problem.origin.partition(",")[0],))
        if filled_by not in blamed and problem not in problems:
            problems.append(problem)
    for rule, problem in broken_rules(whole(full, []), slots_origin=slots_origin):
        if rule.warning and batch is not None:  # an assumed batch supports no warning
            warnings.append(problem)
        elif not rule.warning and (counted or rule.code not in OF_SLOTS):
            problems.append(problem)
    if problems:
        raise ConfigError(problems, warnings)
    return whole(full, warnings)


def _judged(ds: Document, changes: list[Change]) -> tuple[Document, list[Problem]]:
    """A DeepSpeed JSON with changes, in normal form and without the values that have a problem; and the problems."""
    changed = ds.overwritten(*changes)
    found = located_problems(changed)
    for path in {path for path, _ in found if path}:
        if changed.get(path, NOT_GIVEN) is not NOT_GIVEN:  # null is a value, too
            changed = changed.overwritten((path, NOT_GIVEN, ""))
    return normalized(changed), [problem for _, problem in found]


def missing_packages(hyperparameters: Document) -> list[Problem]:
    """A problem for each tool of ``logging`` whose package is not here; what DeepSpeed needs, it names itself."""
    fix = "pip install '{}' (on a cluster: in environment.image, or in startup-hook.sh), or remove it"
    message = "needs the package {}, which is not installed on this machine"
    problems = []
    for name in read_loggers(hyperparameters):
        if find_spec(name) is None:
            package, path = TOOLS[name].package, (LOGGING, name)
            about = message.format(package), fix.format(package), "missing-package"
            problems.append(hyperparameters.problem(path, *about, value=NOT_GIVEN))
    return problems


# ------------------------------------------------------------------------------------------- where points train


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where points train. The files of DeepSpeed JSONs are read once for all points."""

    context_dir: Path  # the folder that paths of DeepSpeed JSONs are relative to
    accelerator: Accelerator  # what the ranks compute on
    slots: int | None = None  # ranks in all, >= 1; None: as the experiment says
    slots_origin: str = ""  # where they were stated
    machines: int = 1  # that the slots are spread over
    _read: dict[str | None, Document] = field(default_factory=dict, repr=False, compare=False)

    def deepspeed_json(self, hyperparameters: Document) -> Document:
        """The DeepSpeed JSON that ``hyperparameters.deepspeed_config`` names or holds; an empty one without it.

        Raises:
            ConfigError: the path leaves the context directory, or the file cannot be read.
        """
        inner: KeyPath = ("deepspeed_config",)
        value = hyperparameters.get(inner)
        if isinstance(value, dict):
            return replace(hyperparameters.sub(inner), prefix="")
        if not isinstance(value, str):
            return self._read.setdefault(None, Document(name="no deepspeed_config", data={}))
        if value in self._read:
            return self._read[value]
        root = os.path.realpath(self.context_dir)
        target = os.path.realpath(os.path.join(root, value))
        message, fix = "", "give a path relative to the context directory"
        if os.path.commonpath([root, target]) != root:
            message = "lies outside the context directory, so a cluster would not get it"
            fix = f"move it inside, and {fix}"
        elif not os.path.isfile(target):
            message = "is not a file" if os.path.exists(target) else "no such file in the context directory"
            folder = next(each for each in Path(target).parents if os.path.isdir(each))
            names = sorted(os.path.relpath(path, root) for path in folder.glob("*.json"))
            fix = f"there are: {', '.join(names[:12])}" if names else fix
        if message:
            raise ConfigError(hyperparameters.problem(inner, message, fix, "deepspeed-config-path"))
        self._read[value] = read_json(self.context_dir / value)
        return self._read[value]


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


# ------------------------------------------------------------------------------------------- a JSON by itself


def first_json(zero: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A DeepSpeed JSON whose batch, optimizer and precision an experiment fills in.

    Args:
        zero: ``zero_optimization``.
        sections: Other sections, over those; of any that is None nothing is written.
    """
    of_adam = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    made = {
        **dict.fromkeys(BATCH_KEYS, AUTO),
        ZERO: zero,
        "optimizer": {"type": "AdamW", "params": of_adam},
        "scheduler": None,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        **sections,
    }
    return {key: value for key, value in made.items() if value is not None}


def problems_alone(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings): what is wrong with the keys of a DeepSpeed JSON in every experiment that could name it."""
    ds, faults = _judged(ds, [])
    refused, ignored = json_problems(ds)
    return [*faults, *refused], ignored


def load_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON, and refuse what DeepSpeed would not read in it.

    Args:
        path: Of the file. Only JSON: no comments, no commas at the end.

    Returns:
        A plain dict, ``"auto"`` where the file says so. Whole floats are integers where DeepSpeed takes
        integers (``5e8``).

    Raises:
        ConfigError: the file cannot be read, or is not JSON, or repeats a key, or has one that DeepSpeed does not
            know, reads as another type, or has renamed; all of them, each with its line.
    """
    document = read_json(Path(path))
    if problems := [problem for _, problem in located_problems(document)]:
        raise ConfigError(problems)
    return normalized(document).data
