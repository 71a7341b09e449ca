"""What a configuration needs of the machine that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.check.trial import check_entrypoint
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import Where, missing_packages
from determined_ds.devices import kind_of_device
from determined_ds.doctor.compilers import is_prebuilt
from determined_ds.doctor.extensions import CXX, NVCC, ops_of
from determined_ds.errors import Problem
from determined_ds.experiment.decide import decide_stated, read_document
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.experiment.variables import variables_for

WORKERS = "num_workers"  # a hyperparameter of the models here, and a usual one elsewhere


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a run takes.

    Args:
        slots: Ranks in all.
        workers: Of each rank's loaders, where a hyperparameter says so.
        tools: Tool -> what for, in words.
        packages: Problems of packages that the DeepSpeed JSON names and that are not installed.
        storage: ``checkpoint_storage``; None where it is left to the cluster.
        variables: Of the ranks' environment; None for one to remove.
    """

    slots: int = 1
    workers: int = 0
    tools: Mapping[str, list[str]] = field(default_factory=dict)
    packages: tuple[Problem, ...] = ()
    storage: Mapping[str, Any] | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)


def needs_of(config: Path, context_dir: Path, accelerator: Accelerator) -> Requirements:
    """What an experiment needs of a machine with an accelerator of this kind, however many of them it has.

    Args:
        config: The experiment's YAML.
        context_dir: The folder with the code.
        accelerator: What ranks would compute on.

    Raises:
        ConfigError: it cannot run anywhere; every reason.
    """
    document = read_document(config, context_dir, command="doctor")
    experiment = parse_experiment(document)
    check_entrypoint(experiment, context_dir)
    enough = Accelerator(
        name=accelerator.name,
        num_devices=max(accelerator.num_devices, experiment.slots),
        bf16=accelerator.bf16,
        fp16=accelerator.fp16,
    )
    point = experiment.hyperparameters
    resolved = decide_stated(experiment, point, Where(context_dir=context_dir, accelerator=enough))
    tools: dict[str, list[str]] = {}
    for op in ops_of(resolved) if resolved else ():
        for tool in () if NVCC in op.tools and is_prebuilt(op.name) else op.tools:
            tools.setdefault(tool, []).append(f"{op.name} ({'.'.join(map(str, op.key))})")
    if resolved and resolved.torch_compile:
        tools.setdefault(CXX, []).append("torch.compile (hyperparameters.torch_compile)")
    workers = _first_of(WORKERS, point.data)
    storage = document.get(("checkpoint_storage",))
    return Requirements(
        slots=experiment.slots,
        workers=workers if isinstance(workers, int) else 0,
        tools=tools,
        packages=tuple(missing_packages(resolved.ds if resolved else None, point)),
        storage=storage if isinstance(storage, dict) else None,
        variables=variables_for(document, kind_of_device(accelerator)).values,
    )


def _first_of(name: str, node: Any) -> Any:
    """The first value of a key of this name, at any depth."""
    if not isinstance(node, dict):
        return None
    if name in node:
        return node[name]
    return next((found for each in node.values() if (found := _first_of(name, each)) is not None), None)
