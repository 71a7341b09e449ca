"""What a run records of itself: each launch, how it ended, what its ranks have warned of; and the run read whole.

``launches.jsonl`` has a line each time ranks are started, with what was decided and where they run; a resume and a
restart keep the lines before. ``result.json`` says how the run ended, for programs: nothing that is printed for people
has to be parsed. ``logs/warnings-rank<R>.jsonl`` counts warnings: a rank writes a line at the first time, at the
second, the fourth, the eighth and so on, and what is left at its end, so it stays small whatever warns. Secrets are
masked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from determined_ds import __version__
from determined_ds.checkpoints.files import Checkpoint, checkpoints_in
from determined_ds.checkpoints.retention import is_better
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.files import read_yaml, write_whole
from determined_ds.errors import EXIT_CONFIG, ConfigError, DeterminedDSError
from determined_ds.experiment.secrets import masked, masked_command
from determined_ds.rundir.limits import num_cores
from determined_ds.rundir.metrics_file import Record, append_record, jsonable, read_records
from determined_ds.rundir.run_dir import RunDir, run_dir_problem, short
from determined_ds.rundir.run_lock import is_held

T = TypeVar("T")


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _read(cls: type[T], text: str | bytes) -> T | None:
    """A record of JSON; None where it is damaged. What a later version has added is left out."""
    try:
        found: T = _adapter(cls).validate_json(text)  # type: ignore[arg-type]
        return found
    except ValueError:  # pydantic's, too
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


# ------------------------------------------------------------------------------------------- launches.jsonl

START, RESUME, RESTART, FORK = "start", "resume", "restart", "fork"
# Named above a run, and others that a run may depend on.
PACKAGES = ("determined", "deepspeed", "torch")
MORE_PACKAGES = ("transformers", "datasets", "peft", "numpy", "triton", "wandb", "mlflow", "mlflow-skinny")


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
    hyperparameters: Mapping[str, Any],
    resolved: ResolvedConfig | None,
    accelerator: Accelerator,
    **more: Any,
) -> Launch:
    """Describe a launch that begins now.

    Args:
        hyperparameters: As of :class:`Launch`; masked here.
        resolved: What was decided; None where the code decides it.
        accelerator: What the ranks compute on.
        more: Further fields of a :class:`Launch`.
    """
    program = Path(sys.argv[0]).name
    typed = [program, *sys.argv[1:]] if program == "det-ds" else sys.orig_argv
    return Launch(
        time=round(time.time(), 3),
        command=masked_command(typed),
        accelerator=accelerator.name,
        hyperparameters=jsonable(masked({"hyperparameters": dict(hyperparameters)})["hyperparameters"]),
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
    models = (line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    processor = next(models, "").partition(":")[2].strip()
    return {
        "host": socket.gethostname(),
        "processor": processor or platform.processor() or platform.machine(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "devices": accelerator.num_devices if accelerator.name != "cpu" else 0,
    }


def launch_line(launch: Launch) -> str:
    """A launch as a line of the file."""
    return json.dumps(jsonable(asdict(launch)), allow_nan=False) + "\n"


def read_launches(path: Path) -> tuple[Launch, ...]:
    """The launches of a file, the first one first; none if there is no file. Torn lines are left out."""
    return tuple(launch for line in _lines(path) if (launch := _read(Launch, line)) is not None)


# ------------------------------------------------------------------------------------------- result.json

# status
COMPLETED, STOPPED, FAILED, INVALID = "completed", "stopped", "failed", "invalid"
# cause of a run that is failed or invalid
CONFIGURATION = "configuration"  # it cannot run
ERROR = "error"  # diagnosed: a checkpoint that cannot be written, a loss that is not finite
CRASH = "crash"  # an exception that nothing expected
OUT_OF_MEMORY = "out of memory"
EXHAUSTED = "exhausted"  # a disk, shared memory or open files
KILLED = "killed"  # by a signal; Linux sends SIGKILL when memory runs out
HANG = "hang"
LOST_MACHINE = "lost machine"  # or a rank, or the network between them


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Args:
        status: ``completed``, ``stopped`` (by the user), ``invalid`` (it cannot run) or ``failed``.
        cause: Why it failed, in a word of this module; None where it did not.
        reason: The same in one sentence for people.
        steps_completed: Batches trained.
        trial_seed: The seed of the trial's generators; None where it was never decided.
        best: The best validation: ``metric``, ``value``, ``steps_completed``, ``checkpoint`` (a uuid or None).
        checkpoint: The newest one: ``uuid`` and ``steps_completed``.
        resume: The command that resumes the run; None where it is complete or has no checkpoint.
        continued_by: The command that continues it from its newest checkpoint, where it is complete too.
        slots: Ranks of its last launch; None where none was decided.
    """

    status: str
    cause: str | None = None
    reason: str | None = None
    steps_completed: int = 0
    trial_seed: int | None = None
    best: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None
    resume: str | None = None
    continued_by: str | None = None
    slots: int | None = None

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether memory ran out; where the kernel ends a process for that, only its signal is known."""
        return self.cause in (OUT_OF_MEMORY, KILLED)


def status_of(exit_code: int, *, stopped: bool = False) -> str:
    """The status of a run that ended with an exit code."""
    return STOPPED if stopped else {0: COMPLETED, EXIT_CONFIG: INVALID}.get(exit_code, FAILED)


def write_result(
    run_dir: RunDir,
    *,
    metric: str = "",
    smaller_is_better: bool = True,
    resume: str | None = None,
    status: str,
    **more: Any,
) -> None:
    """Write how a run ended, whole or not at all; a full disk has been reported by the run itself.

    Args:
        run_dir: The run directory; its metrics and checkpoints are read.
        metric: ``searcher.metric``.
        smaller_is_better: Whether smaller values of it are better.
        resume: The command that resumes the run, should it have a checkpoint.
        status: As of :class:`RunResult`.
        more: Its ``cause``, ``reason``, ``trial_seed`` and ``slots``.
    """
    kept, records = checkpoints_in(run_dir.checkpoints), read_records(run_dir.metrics)
    uuids = {each.steps_completed: each.uuid for each in reversed(kept)}
    best: dict[str, Any] | None = None
    for record in records:
        value = record["metrics"].get(metric) if record["group"] == "validation" else None
        if value is not None and is_better(
            value, best and best["value"], smaller_is_better=smaller_is_better
        ):
            steps = record["steps_completed"]
            best = {
                "metric": metric,
                "value": value,
                "steps_completed": steps,
                "checkpoint": uuids.get(steps),
            }
    steps = [each.steps_completed for each in kept] + [each["steps_completed"] for each in records]
    result = RunResult(
        status=status,
        steps_completed=max(steps, default=0),
        best=best,
        checkpoint={"uuid": kept[0].uuid, "steps_completed": kept[0].steps_completed} if kept else None,
        resume=resume if kept and status != COMPLETED else None,
        continued_by=resume if kept else None,
        **more,
    )
    with contextlib.suppress(OSError):
        write_whole(run_dir.result, json.dumps(jsonable(asdict(result)), indent=2) + "\n")


def read_result(run_dir: RunDir) -> RunResult | None:
    """How a run ended; None where no such file was written, or a part of it by another program."""
    try:
        result = _read(RunResult, run_dir.result.read_bytes())
    except OSError:
        return None
    if result is None:
        return None
    resume, continued_by = (command_here(each, run_dir) for each in (result.resume, result.continued_by))
    return replace(result, resume=resume, continued_by=continued_by)


def command_here(command: str | None, run_dir: RunDir) -> str | None:
    """A command of a run, with the run directory where it lies now: it may have been moved or copied since."""
    try:
        words = shlex.split(command or "")
    except ValueError:  # nobody can run it anyway
        words = []
    if not words:
        return command
    if "--run-dir" in words[:-1]:
        place = words.index("--run-dir") + 1
        experiment = f"{words[place]}/{run_dir.experiment.name}"
        words = [short(run_dir.experiment) if word == experiment else word for word in words]
        return shlex.join([*words[:place], short(run_dir.path), *words[place + 1 :]])
    name, is_variable, _ = words[0].partition("=")  # of a session: it is in the environment
    return f"{name}={shlex.quote(short(run_dir.path))} {shlex.join(words[1:])}" if is_variable else command


# ------------------------------------------------------------------------------------------- warnings of ranks

LONGEST = 2000  # characters of a message that are kept


@dataclass(frozen=True, kw_only=True)
class KeptWarning:
    """A warning, however often it came and from however many ranks.

    Args:
        message: As it came first.
        source: The logger, or the category of a Python warning with its place.
        level: ``WARNING``, ``ERROR`` or ``CRITICAL``.
        count: How often it came, at least: what a killed rank had not written yet is not in it.
        ranks: Those it came from.
        time: Of the first one, seconds since the epoch.
        last_time: Of the last one that was written.
        steps_completed: Batches that had been trained when it came first; 0 before the first one of a process.
    """

    message: str
    source: str = ""
    level: str = "WARNING"
    count: int = 1
    ranks: tuple[int, ...] = ()
    time: float = 0.0
    last_time: float = 0.0
    steps_completed: int = 0


def kind_of(source: str, message: str) -> tuple[str, str]:
    """What two warnings have in common that are counted together: they differ in numbers at most."""
    return re.sub(r"\d+", "0", source), re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "0", message)


def append_warning(folder: Path, warning: KeptWarning, rank: int) -> None:
    """Append a line about a warning; where it cannot be written, training matters more.

    Args:
        folder: ``logs`` of a run directory.
        warning: It; its ``count`` is since the line before.
        rank: That has warned.
    """
    line: dict[str, Any] = {
        "time": round(warning.last_time, 3),
        "rank": rank,
        "steps_completed": warning.steps_completed,
    }
    line |= {"level": warning.level, "source": warning.source, "count": warning.count}
    line["message"] = warning.message[:LONGEST]
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        append_record(folder / f"warnings-rank{rank}.jsonl", line)


def read_warnings(run_dir: RunDir) -> tuple[KeptWarning, ...]:
    """The warnings of all ranks, in the order in which they came first; lines that are torn are left out."""
    found = []
    for path in run_dir.logs.glob("warnings-rank*.jsonl"):
        for line in _lines(path):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                said = json.loads(line)
                own = {"ranks": (int(said.pop("rank")),), "last_time": float(said["time"])}
                found.append(_adapter(KeptWarning).validate_python({**said, **own}))
    return counted(found)


def counted(warnings: Iterable[KeptWarning]) -> tuple[KeptWarning, ...]:
    """Warnings with those of one kind counted together, in the order in which they came first."""
    found: dict[tuple[str, str], KeptWarning] = {}
    for warning in warnings:
        kind = kind_of(warning.source, warning.message)
        if (known := found.get(kind)) is not None:
            warning = replace(
                min(known, warning, key=lambda each: each.time),
                count=known.count + warning.count,
                ranks=tuple(sorted({*known.ranks, *warning.ranks})),
                last_time=max(known.last_time, warning.last_time),
            )
        found[kind] = warning
    return tuple(sorted(found.values(), key=lambda each: each.time))


# ------------------------------------------------------------------------------------------- a run, read whole


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run has left so far: read once, whole, while it trains or afterwards.

    Args:
        path: The run directory.
        config: Of the experiment, as it was run; empty where the file cannot be read.
        ds_config: What DeepSpeed was given; empty where no engine was made.
        launches: Each start of its ranks, the first one first; none of a run of an earlier version.
        records: The lines of ``metrics.jsonl``: ``group``, ``steps_completed``, ``metrics``, and mostly ``time``.
        checkpoints: Those that it keeps, the newest first.
        result: How it ended; None of one that has not, or was killed.
        damaged: Of each file of JSON that is there and cannot be read: its name, and what is wrong with it.
        is_running: Whether a process of this machine, or of one that shares its locks, trains it now.
    """

    path: Path
    config: Mapping[str, Any]
    ds_config: Mapping[str, Any]
    launches: tuple[Launch, ...]
    records: tuple[Record, ...]
    checkpoints: tuple[Checkpoint, ...]
    result: RunResult | None
    is_running: bool
    damaged: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the experiment; that of the folder, where it is not recorded."""
        return str(self.config.get("name") or self.path.name)

    @property
    def resume(self) -> str | None:
        """The command that resumes it; of a run that was killed and wrote no result.json, as its launch recorded it."""
        if self.result is not None:
            return self.result.resume
        if self.is_running or not self.checkpoints or not self.launches:
            return None
        return command_here(self.launches[-1].resume, RunDir(self.path)) or None

    def of_group(self, group: str) -> list[Record]:
        """The records of a group, e.g. ``training``."""
        return [record for record in self.records if record["group"] == group]


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    there = RunDir(path)
    return there.experiment.is_file() and any(
        each.exists() for each in (there.metrics, there.result, there.lock)
    )


def read_run(path: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: it is not one.
    """
    if not is_run(path):
        message = "is not a run directory" if path.exists() else "does not exist"
        fix = "name a folder that det-ds run has made, e.g. one of runs/*/*"
        raise ConfigError(run_dir_problem(path, message, fix))
    there, damaged = RunDir(path), []

    def content(file: Path) -> dict[str, Any]:
        try:
            found = json.loads(file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            damaged.append(f"{file.name} cannot be read: {error}; remove it")
            return {}
        if not isinstance(found, dict):
            damaged.append(f"{file.name} is not a JSON object; remove it")
            return {}
        return found

    config: dict[str, Any] = {}
    with contextlib.suppress(DeterminedDSError, OSError):
        config = dict(read_yaml(there.experiment).data)
    return RecordedRun(
        path=path,
        config=config,
        ds_config=content(there.deepspeed_config),
        launches=read_launches(there.launches),
        records=tuple(read_records(there.metrics)),
        checkpoints=tuple(checkpoints_in(there.checkpoints)),
        result=read_result(there),
        is_running=is_held(path),
        damaged=tuple(damaged),
    )
