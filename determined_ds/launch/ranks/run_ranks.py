"""``det-ds run``'s own process: starts the ranks, passes on the user's signals. Loads no torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from determined_ds.checkpoints.files import checkpoints_in, remove_partial
from determined_ds.config.layout import Accelerator
from determined_ds.devices import threads_per_rank
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.ranks.failures import reason_of_failure, reason_of_hang, show_failure, show_hang
from determined_ds.launch.ranks.group import Ranks
from determined_ds.launch.ranks.hang import HANG_TIMEOUT_S, Hang, HangWatch
from determined_ds.launch.ranks.process import Failure
from determined_ds.rundir.conclusion import HANG, status_of
from determined_ds.rundir.exhausted import allow_open_files
from determined_ds.rundir.handed_on import HANG_TIMEOUT
from determined_ds.rundir.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks ended.

    Args:
        failures: The first one first; none where all succeeded.
        signals: Those that the user sent.
        hang: Why they were ended, where no rank made progress.
    """

    failures: tuple[Failure, ...] = ()
    signals: tuple[int, ...] = ()
    hang: Hang | None = None

    @property
    def stopped(self) -> bool:
        """Whether the user stopped it, and nothing else went wrong."""
        return bool(self.signals and not self.hang) and all(
            failure.code in (-signal.SIGKILL, -signal.SIGTERM) for failure in self.failures
        )

    @property
    def exit_code(self) -> int:
        """0, also when stopped by one signal; 2: it cannot run; 1: it failed; 128 + the number of a second signal."""
        if self.stopped:
            return 0 if len(self.signals) == 1 else 128 + self.signals[-1]
        if not self.failures and not self.hang:
            return 0
        if self.hang:
            return EXIT_TRAINING_FAILED
        return EXIT_CONFIG if self.failures[0].exit_code == EXIT_CONFIG else EXIT_TRAINING_FAILED

    @property
    def status(self) -> str:
        """As ``result.json`` has it, like the two below."""
        return status_of(self.exit_code, stopped=self.stopped)

    @property
    def cause(self) -> str | None:
        if self.stopped or not (self.hang or self.failures):
            return None
        return HANG if self.hang else self.failures[0].cause

    @property
    def reason(self) -> str | None:
        if self.cause is None:
            return None
        return reason_of_hang(self.hang) if self.hang else reason_of_failure(self.failures[0])


def run_ranks(
    words: Sequence[str],
    *,
    num_ranks: int,
    accelerator: Accelerator,
    context_dir: Path,
    run_dir: Path,
    variables: Mapping[str, str | None] | None = None,
    keep_open: Sequence[int] = (),
    hang_timeout_s: float = HANG_TIMEOUT_S,
) -> Outcome:
    """Start the ranks of a run on this machine, and wait for them.

    Rank 0 writes to this terminal, the others to ``run_dir/logs``. When one dies, the others are ended.
    The first SIGINT, SIGTERM or SIGHUP has the ranks finish their batch and checkpoint; the second ends them.

    Args:
        words: What each runs, after ``python3 -m``.
        num_ranks: Ranks to start.
        accelerator: What they compute on.
        context_dir: Their working directory.
        run_dir: The run directory; it exists.
        variables: The user's environment variables for the ranks; None for one to remove.
        keep_open: Descriptors that the ranks inherit.
        hang_timeout_s: They are ended where none shows a sign of life for this long; 0: no limit.
    """
    allow_open_files()
    there = RunDir(run_dir)
    there.logs.mkdir(exist_ok=True)
    ranks = Ranks(
        [sys.executable, "-m", *words],
        size=num_ranks,
        environment={
            **environment_of_ranks(num_ranks, accelerator, context_dir, variables or {}),
            HANG_TIMEOUT: str(hang_timeout_s / 60),
        },
        cwd=context_dir,
        run_dir=there,
        keep_open=keep_open,
    )
    watch = HangWatch(ranks, hang_timeout_s)
    message = "stopping after this batch, with a checkpoint"
    with Interrupts(message, announced=False) as interrupts, ranks:
        failures = ranks.wait(_SignalForwarder(interrupts, ranks).look, watch.look)
    if failures:
        remove_partial(there.checkpoints)
    return Outcome(failures=tuple(failures), signals=tuple(interrupts.signals), hang=watch.hang)


def show_outcome(outcome: Outcome, run_dir: Path, resume_with: str, *, closes: bool = False) -> None:
    """Print why a run failed, or how to resume one that was stopped, on stderr; nothing for a complete one.

    Args:
        outcome: How the ranks ended.
        run_dir: Of the run.
        resume_with: The command.
        closes: Whether a closing block follows, which has the command.
    """
    there = RunDir(run_dir)
    if outcome.hang:
        show_hang(outcome.hang, there, resume_with)
    elif not outcome.stopped and outcome.failures:
        show_failure(outcome.failures[0], there)
    elif outcome.signals and checkpoints_in(there.checkpoints):
        if closes:
            return
        print(f"resume with: {resume_with}", file=sys.stderr)
    elif outcome.signals:
        print("stopped before the first checkpoint; nothing to resume", file=sys.stderr)


class _SignalForwarder:
    """Passes the user's signals on to the ranks: the first requests a stop, the second ends them."""

    def __init__(self, interrupts: Interrupts, ranks: Ranks) -> None:
        self._interrupts = interrupts
        self._ranks = ranks
        self._is_requested = self._is_killed = False

    def look(self) -> None:
        """Pass on what has come."""
        if self._interrupts.at_once:
            if sys.stdout.isatty() and not self._is_killed:
                print()  # after the ^C that the terminal shows
            self._is_killed = True
            self._ranks.kill()
        elif self._interrupts.requested and not self._is_requested:
            self._is_requested = True
            self._ranks.send(signal.SIGTERM)
            self._interrupts.announce()  # once the ranks have it: who reads it may rely on that


def environment_of_ranks(
    num_ranks: int, accelerator: Accelerator, context_dir: Path, variables: Mapping[str, str | None]
) -> dict[str, str]:
    """The environment of the ranks of a machine: this process's, with what they need before they load torch.

    Args:
        num_ranks: On this machine.
        accelerator: What they compute on.
        context_dir: With the trial's code.
        variables: The experiment's environment variables; None for one to remove.
    """
    own = {name: value for name, value in variables.items() if value is not None}
    environment = {
        name: value for name, value in os.environ.items() if variables.get(name, value) is not None
    }
    environment |= own
    environment["DS_ACCELERATOR"] = accelerator.name
    paths = [str(context_dir), own.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment
