"""``result.json``: how a run ended, for programs. Nothing that is printed for people has to be parsed.

A rank says why it ends through :func:`~determined_ds.rundir.handed_on.report_failure`; the launcher writes the file.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.checkpoints.retention import is_better
from determined_ds.documents.files import write_whole
from determined_ds.errors import EXIT_CONFIG
from determined_ds.rundir.metrics_file import jsonable, read_records
from determined_ds.rundir.run_dir import RunDir, short

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
    status: str,
    cause: str | None = None,
    reason: str | None = None,
    trial_seed: int | None = None,
    metric: str = "",
    smaller_is_better: bool = True,
    resume: str | None = None,
    slots: int | None = None,
) -> None:
    """Write how a run ended, whole or not at all; a full disk has been reported by the run itself.

    Args:
        run_dir: The run directory; its metrics and checkpoints are read.
        status: As of :class:`RunResult`, like the arguments below.
        cause: Why it failed.
        reason: The same for people.
        trial_seed: What the trial's generators started from.
        metric: ``searcher.metric``.
        smaller_is_better: Whether smaller values of it are better.
        resume: The command that resumes the run, should it have a checkpoint.
        slots: Ranks that were started.
    """
    kept = checkpoints_in(run_dir.checkpoints)
    records = read_records(run_dir.metrics)
    steps = [each.steps_completed for each in kept]
    steps += [each["steps_completed"] for each in records]
    newest = {"uuid": kept[0].uuid, "steps_completed": kept[0].steps_completed} if kept else None
    result = RunResult(
        status=status,
        cause=cause,
        reason=reason,
        steps_completed=max(steps, default=0),
        trial_seed=trial_seed,
        best=_best(records, metric, smaller_is_better),
        checkpoint=newest,
        resume=resume if newest and status != COMPLETED else None,
        continued_by=resume if newest else None,
        slots=slots,
    )
    if result.best:
        at = result.best["steps_completed"]
        result.best["checkpoint"] = next((each.uuid for each in kept if each.steps_completed == at), None)
    with contextlib.suppress(OSError):
        write_whole(run_dir.result, json.dumps(jsonable(asdict(result)), indent=2) + "\n")


def read_result(run_dir: RunDir) -> RunResult | None:
    """How a run ended; None where no such file was written, or a part of it by another program."""
    try:
        found = json.loads(run_dir.result.read_bytes())
        known = {field.name for field in fields(RunResult)}  # another version may have written more
        result = RunResult(**{name: value for name, value in found.items() if name in known})
        resume, continued_by = (command_here(each, run_dir) for each in (result.resume, result.continued_by))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
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


def _best(records: list[dict[str, Any]], metric: str, smaller_is_better: bool) -> dict[str, Any] | None:
    best: dict[str, Any] | None = None
    for record in records:
        value = record["metrics"].get(metric) if record["group"] == "validation" else None
        if is_better(value, best and best["value"], smaller_is_better=smaller_is_better):
            best = {"metric": metric, "value": value, "steps_completed": record["steps_completed"]}
    return best
