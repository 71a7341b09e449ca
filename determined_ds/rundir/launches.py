"""``launches.jsonl``: a line each time ranks are started for a run, with what was decided and where they run.

The last line is of the ranks that run now, or ran last. Lines of an earlier start are kept by a resume and by a
restart, and tell the two apart. Secrets are masked.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from determined_ds import __version__
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.experiment.secrets import masked, masked_command
from determined_ds.rundir.cores import num_cores
from determined_ds.rundir.metrics_file import jsonable

START, RESUME, RESTART, FORK = "start", "resume", "restart", "fork"
# Named above a run, and others that a run may depend on.
PACKAGES = ("determined", "deepspeed", "torch")
MORE_PACKAGES = (
    "transformers",
    "datasets",
    "peft",
    "numpy",
    "triton",
    "wandb",
    "mlflow",
    "mlflow-skinny",
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of the ranks of a run.

    Args:
        time: Seconds since the epoch.
        kind: ``start``, ``resume`` by the user, ``restart`` after a crash, or ``fork`` from another run's checkpoint.
        reason: Of a restart: why.
        steps_completed: Batches trained before it.
        checkpoint: Uuid of the checkpoint that it loads; "" without one.
        name: Of the experiment.
        runs: ``MODULE:CLASS`` or a script.
        command: As it was typed.
        resume: The command that resumes the run from its newest checkpoint; "" where it is not known.
        slots: Ranks.
        machines: That they are spread over.
        accelerator: ``cpu`` or ``cuda``.
        strategy: In a word, e.g. ``zero1``; "" where the code decides it, as of all below to ``origins``.
        global_batch_size: Samples per optimizer step; 0 where it is not known.
        micro_batch_size: The same of a forward pass.
        accumulation: Micro-batches of a step.
        replicas: Data-parallel copies.
        trial_seed: What the generators start from.
        hyperparameters: The point that is trained.
        ds_config: What DeepSpeed is given.
        origins: Dotted key of ``ds_config`` -> where its value came from.
        warnings: About the configuration.
        versions: Package -> version.
        machine: Facts of the machine that the chief is on: ``host``, ``processor``, ``cores``, ``memory_bytes``,
            ``system``, ``devices``.
    """

    time: float
    kind: str = START
    reason: str = ""
    steps_completed: int = 0
    checkpoint: str = ""
    name: str = ""
    runs: str = ""
    command: str = ""
    resume: str = ""
    slots: int = 1
    machines: int = 1
    accelerator: str = "cpu"
    strategy: str = ""
    global_batch_size: int = 0
    micro_batch_size: int = 0
    accumulation: int = 0
    replicas: int = 0
    trial_seed: int = 0
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def launch_of(
    *,
    name: str,
    runs: str,
    hyperparameters: Mapping[str, Any],
    resolved: ResolvedConfig | None,
    accelerator: Accelerator,
    slots: int,
    trial_seed: int,
    **more: Any,
) -> Launch:
    """Describe a launch that begins now.

    Args:
        name: As of :class:`Launch`.
        runs: The same.
        hyperparameters: The same; masked here.
        resolved: What was decided; None where the code decides it.
        accelerator: What the ranks compute on.
        slots: Ranks.
        trial_seed: As of :class:`Launch`.
        more: Further fields of a :class:`Launch`.
    """
    config = masked({"hyperparameters": dict(hyperparameters)})["hyperparameters"]
    return Launch(
        time=round(time.time(), 3),
        name=name,
        runs=runs,
        command=_command(),
        slots=slots,
        accelerator=accelerator.name,
        trial_seed=trial_seed,
        hyperparameters=jsonable(config),
        versions=versions(),
        machine=machine_facts(accelerator),
        **(decided_fields(resolved) if resolved is not None else {}),
        **more,
    )


def decided_fields(resolved: ResolvedConfig) -> dict[str, Any]:
    """The fields of a :class:`Launch` that say what was decided."""
    batch = resolved.batch
    return {
        "machines": resolved.machines,
        "strategy": resolved.strategy.name,
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "accumulation": batch.accumulation,
        "replicas": batch.replicas,
        "ds_config": masked({"deepspeed_config": resolved.ds_config})["deepspeed_config"],
        "origins": dict(resolved.origins),
        "warnings": tuple(str(warning) for warning in resolved.warnings),
    }


def _command() -> str:
    """The command of this process, as it was typed."""
    program = Path(sys.argv[0]).name
    words = [program, *sys.argv[1:]] if program == "det-ds" else sys.orig_argv
    return masked_command(words)


def versions(*, more: bool = True) -> dict[str, str]:
    """Package -> version, of those installed that a run may depend on.

    Args:
        more: Also those that a header leaves out.
    """
    found = {"determined_ds": __version__}
    for name in (*PACKAGES, *(MORE_PACKAGES if more else ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "Python": platform.python_version()}


def machine_facts(accelerator: Accelerator) -> dict[str, Any]:
    """Facts of this machine, as of :class:`Launch`."""
    return {
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "devices": accelerator.num_devices if accelerator.name != "cpu" else 0,
    }


def _processor() -> str:
    """The model of the processor, where the system says it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def launch_line(launch: Launch) -> str:
    """A launch as a line of the file."""
    return json.dumps(jsonable(asdict(launch)), allow_nan=False) + "\n"


def read_launches(path: Path) -> tuple[Launch, ...]:
    """The launches of a file, the first one first; none if there is no file. Fields of a later version are left out."""
    known = {each.name for each in fields(Launch)}
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                given = {key: value for key, value in json.loads(line).items() if key in known}
                found.append(Launch(**{**given, "warnings": tuple(given.get("warnings", ()))}))
    return tuple(found)
