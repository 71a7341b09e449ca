"""What a run records of itself: each launch, how it ended; and the run read whole.

``launches.jsonl`` has a line each time ranks are started, with what was decided and where they run; a resume and a
restart keep the lines before. ``result.json`` says how the run ended, for programs: nothing that is printed for people
has to be parsed. Secrets are masked.
"""

from __future__ import annotations

import contextlib
import functools
import json
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
from determined_ds.checkpoints.files import (
    Checkpoint,
    as_number,
    best_of,
    checkpoints_in,
    is_better,
    read_object,
)
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.files import read_yaml, write_whole
from determined_ds.errors import EXIT_CONFIG, ConfigError, DeterminedDSError
from determined_ds.experiment.secrets import masked, masked_command
from determined_ds.rundir.handed_on import BEST, LAST
from determined_ds.rundir.limits import num_cores
from determined_ds.rundir.metrics_file import Record, append_record, jsonable, read_records
from determined_ds.rundir.run_dir import CHECKPOINTS, PARTIAL_FILE, RunDir, is_held, run_dir_problem, short

T = TypeVar("T")


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _read(cls: type[T], path: Path, *, lines: bool = True) -> list[T]:
    """The records in a file of JSON, one a line or one in all; those that are torn or damaged are left out."""
    found: list[T] = []
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")
        for record in text.splitlines() if lines else [text]:
            with contextlib.suppress(ValueError):  # pydantic's, too
                found.append(_adapter(cls).validate_json(record))  # type: ignore[arg-type]
    return found


# ------------------------------------------------------------------------------------------- launches.jsonl

START, RESUME, RESTART, FORK = "start", "resume", "restart", "fork"
# Named above a run, and others that a run may depend on.
PACKAGES = ("determined", "deepspeed", "torch")
MORE_PACKAGES = ("transformers", "datasets", "peft", "numpy", "triton", "wandb", "mlflow", "mlflow-skinny")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of the ranks of a run."""

    time: float  # seconds since the epoch
    # A start, or a resume by the user, a restart after a crash, a fork from another run's checkpoint.
    kind: str = START
    reason: str = ""  # of a restart: why
    steps_completed: int = 0  # batches trained before it
    trained_before: int = (
        0  # batches that its run had trained until then, whatever checkpoint it goes on from
    )
    checkpoint: str = ""  # uuid of the checkpoint that it loads
    name: str = ""  # of the experiment
    runs: str = ""  # MODULE:CLASS or a script
    command: str = ""  # as it was typed
    resume: str = ""  # the command that resumes the run from its newest checkpoint; "" where it is not known
    slots: int = 1  # ranks
    machines: int = 1  # that they are spread over
    accelerator: str = "cpu"  # or cuda
    strategy: str = ""  # in a word, e.g. zero1; "" where the code decides it, as of all below to origins
    global_batch_size: int = 0  # samples per optimizer step; 0 where it is not known
    micro_batch_size: int = 0  # the same of a forward pass
    accumulation: int = 0  # micro-batches of a step
    replicas: int = 0  # data-parallel copies
    trial_seed: int = 0  # what the generators start from
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # the point that is trained
    ds_config: Mapping[str, Any] = field(default_factory=dict)  # what DeepSpeed is given
    # Dotted key of ds_config -> where its value came from.
    origins: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages
    machine: Mapping[str, Any] = field(default_factory=dict)  # facts of the machine that the chief is on


def launch_of(
    *,
    hyperparameters: Mapping[str, Any],
    resolved: ResolvedConfig | None,
    accelerator: Accelerator,
    **more: Any,
) -> Launch:
    """Describe a launch that begins now; secrets are masked here.

    Args:
        hyperparameters: As of :class:`Launch`.
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
        machine=machine_facts(),
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
    }


def versions(*, more: bool = True) -> dict[str, str]:
    """Package -> version, of those installed that a run may depend on; ``more``: also those that no header names."""
    found = {"determined_ds": __version__}
    for name in (*PACKAGES, *(MORE_PACKAGES if more else ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {**found, "Python": platform.python_version()}


def machine_facts() -> dict[str, Any]:
    """Facts of this machine, as of :class:`Launch`."""
    named = None
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = named[1] if named else platform.machine()
    return {"host": socket.gethostname(), "processor": processor, "cores": num_cores()}


def read_launches(path: Path) -> tuple[Launch, ...]:
    """The launches of a file, the first one first; none if there is no file. Torn lines are left out."""
    return tuple(_read(Launch, path))


# ------------------------------------------------------------------------------------------- recoveries.jsonl

RECOVERY = "recovery"  # the group of metrics that a master holds them in
# Beside numbers: the text of all faults so far. The web UI sorts the charts of all groups by these names.
FAULTS_OF_MASTER = "recovery_record_"
SKIPPED = "skipped"  # that of the batches which are left out of the data


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that a run recovers from by itself."""

    cause: str  # out of memory, or spike
    reason: str  # in one sentence
    batch: int  # batches trained until then
    micro_batch_size: int = 0  # samples of a micro-batch that did not fit
    skip: tuple[
        tuple[int, int], ...
    ] = ()  # ranges of batches that are left out of the data from then on, all of them
    back_to: str = ""  # of a spike: uuid of the checkpoint to go back to; "": the start
    newest: str = ""  # uuid of the newest checkpoint then; there is a newer one once the run has gone back
    time: float = field(default_factory=lambda: round(time.time(), 3))  # seconds since the epoch


@dataclass(frozen=True)
class Faults:
    """All of a run, the first one first."""

    all: tuple[Fault, ...] = ()

    @property
    def too_large(self) -> int:
        """Samples of the smallest micro-batch that did not fit; 0: none."""
        return min((each.micro_batch_size for each in self.all if each.micro_batch_size), default=0)

    @property
    def skip(self) -> tuple[tuple[int, int], ...]:
        """Ranges of batches that are left out of the data."""
        return next((each.skip for each in reversed(self.all) if each.skip), ())

    @property
    def spikes(self) -> int:
        """Those that were taken back."""
        return sum(bool(each.skip) for each in self.all)

    def goes_back(self, newest: str) -> str | None:
        """The checkpoint to start from in place of the ``newest`` one, "" for the start; None: the newest one."""
        last = self.all[-1] if self.all else None
        return last.back_to if last is not None and last.skip and last.newest == newest else None

    def dumped(self) -> str:
        """As text, for a master."""
        return json.dumps([asdict(each) for each in self.all])


def read_faults(path: Path) -> Faults:
    """The faults in ``recoveries.jsonl``."""
    return Faults(tuple(_read(Fault, path)))


def faults_in(reports: Iterable[Mapping[str, Any]]) -> Faults:
    """The most of :meth:`Faults.dumped` that the metrics of a master hold."""
    texts = [text for report in reports for name, text in report.items() if name.startswith(FAULTS_OF_MASTER)]
    found = (Faults(tuple(_adapter(list[Fault]).validate_json(text))) for text in texts)
    return max(found, key=lambda each: len(each.all), default=Faults())


def record_fault(path: Path, fault: Fault) -> None:
    """Append a fault to ``recoveries.jsonl``."""
    append_record(path, asdict(fault))


# ------------------------------------------------------------------------------------------- result.json

# status
COMPLETED, STOPPED, FAILED, INVALID = "completed", "stopped", "failed", "invalid"
# cause of a run that is failed or invalid
CONFIGURATION = "configuration"  # it cannot run
ERROR = "error"  # diagnosed: a checkpoint that cannot be written, a loss that is not finite
CRASH = "crash"  # an exception that nothing expected
OUT_OF_MEMORY = "out of memory"  # of the accelerator
HOST_MEMORY = "out of host memory"
SPIKE = "spike"  # of the loss, or of the gradient norm
KILLED = "killed"  # by a signal; Linux sends SIGKILL when memory runs out
HANG = "hang"
LOST_MACHINE = "lost machine"  # or a rank, or the network between them


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    status: str  # completed, stopped (by the user), invalid (it cannot run) or failed
    cause: str | None = None  # why it failed, in a word of this module; None where it did not
    reason: str | None = None  # the same in one sentence for people
    steps_completed: int = 0  # batches trained
    trial_seed: int | None = None  # of the trial's generators; None where it was never decided
    # The best validation: metric, value, steps_completed, checkpoint (a uuid or None).
    best: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None  # the newest one: uuid and steps_completed
    resume: str | None = None  # the command that resumes it; None where it is complete or has no checkpoint
    continued_by: str | None = None  # the command that continues it from there, where it is complete too
    # What it has recovered from by itself: time, why, done, steps_lost and seconds_lost of each.
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    goodput: float | None = (
        None  # the share of its time that was training that counted; None where it is not known
    )
    slots: int | None = None  # ranks of its last launch; None where none was decided


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
        more: Its ``cause``, ``reason``, ``trial_seed``, ``slots``, ``recoveries`` and ``goodput``.
    """
    kept, records = checkpoints_in(run_dir.checkpoints), read_records(run_dir.metrics)
    best: dict[str, Any] | None = None
    for record in records:
        value, step = record["metrics"].get(metric), record["steps_completed"]
        if record["group"] != "validation" or value is None:
            continue
        if is_better(value, best and best["value"], smaller_is_better=smaller_is_better):
            at = next((each.uuid for each in kept if each.steps_completed == step), None)
            best = {"metric": metric, "value": value, "steps_completed": step, "checkpoint": at}
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
    for result in _read(RunResult, run_dir.result, lines=False):
        resume, continued_by = (command_here(each, run_dir) for each in (result.resume, result.continued_by))
        return replace(result, resume=resume, continued_by=continued_by)
    return None


def command_here(command: str | None, run_dir: RunDir) -> str | None:
    """A command of a run, with the run directory where it lies now: it may have been moved or copied since."""
    try:
        words, here = shlex.split(command or ""), short(run_dir.path)
    except ValueError:  # nobody can run it anyway
        return command
    if "--run-dir" in words[:-1]:
        was = words[words.index("--run-dir") + 1]
        of_run = {was: here, f"{was}/{run_dir.experiment.name}": short(run_dir.experiment)}
        return shlex.join(of_run.get(word, word) for word in words)
    # Of a session: in the environment.
    name, is_variable, _ = words[0].partition("=") if words else ("", "", "")
    return f"{name}={shlex.quote(here)} {shlex.join(words[1:])}" if is_variable else command


# ------------------------------------------------------------------------------------------- a run, read whole


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run has left so far: read once, whole, while it trains or afterwards."""

    path: Path  # the run directory
    config: Mapping[str, Any]  # of the experiment, as it was run; empty where the file cannot be read
    ds_config: Mapping[str, Any]  # what DeepSpeed was given; empty where no engine was made
    launches: tuple[Launch, ...]  # each start of its ranks, the first one first
    records: tuple[Record, ...]  # lines of metrics.jsonl: group, steps_completed, metrics, and mostly time
    faults: tuple[Fault, ...]  # that it has recovered from by itself
    checkpoints: tuple[Checkpoint, ...]  # those that it keeps, the newest first
    result: RunResult | None  # how it ended; None of one that has not, or was killed
    is_running: bool  # whether a process of this machine, or of one that shares its locks, trains it now

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
    marks = (there.metrics, there.result, there.lock)
    return there.experiment.is_file() and any(each.exists() for each in marks)


def read_run(path: Path) -> RecordedRun:
    """Read a run directory.

    Raises:
        ConfigError: it is not one.
    """
    if not is_run(path):
        message = "is not a run directory" if path.exists() else "does not exist"
        fix = "name a folder that det-ds run has made, e.g. one of runs/*/*"
        raise ConfigError(run_dir_problem(path, message, fix))
    there = RunDir(path)
    config: dict[str, Any] = {}
    with contextlib.suppress(DeterminedDSError, OSError):
        config = dict(read_yaml(there.experiment).data)
    return RecordedRun(
        path=path,
        config=config,
        ds_config=read_object(there.deepspeed_config),
        launches=read_launches(there.launches),
        records=tuple(read_records(there.metrics)),
        faults=read_faults(there.recoveries).all,
        checkpoints=tuple(checkpoints_in(there.checkpoints)),
        result=read_result(there),
        is_running=is_held(path),
    )


# ------------------------------------------------------------------------------------------- best and last


def best_checkpoint(run: RunDir) -> Checkpoint | None:
    """The checkpoint with the best validation of ``searcher.metric`` among those that a run has; None if unknown."""
    searcher: Any = None
    with contextlib.suppress(ConfigError):
        searcher = read_yaml(run.experiment).data.get("searcher")
    if not isinstance(searcher, dict) or not searcher.get("metric"):
        return None
    metric, validated = searcher["metric"], read_records(run.metrics, "validation")
    values = {each["steps_completed"]: as_number(each["metrics"].get(metric)) for each in validated}
    is_smaller = searcher.get("smaller_is_better") is not False
    return best_of(checkpoints_in(run.checkpoints), values, smaller_is_better=is_smaller)


def relink(run: RunDir) -> None:
    """Have the links ``best`` and ``last`` of a run lead to what is best and newest now, where links can be made."""
    newest = next(iter(checkpoints_in(run.checkpoints)), None)
    for name, found in ((BEST, best_checkpoint(run)), (LAST, newest)):
        link, aside = run.path / name, run.path / f".{name}{PARTIAL_FILE}"
        with contextlib.suppress(OSError):
            if found is None:
                link.unlink(missing_ok=True)
            else:
                aside.unlink(missing_ok=True)
                aside.symlink_to(f"{CHECKPOINTS}/{found.uuid}", target_is_directory=True)
                aside.replace(link)  # in one call of the system
