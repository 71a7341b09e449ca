"""``max_restarts`` without a cluster: a run that crashed is restarted from its newest good checkpoint.

With ``--elastic`` a rank that ends the run again, with no new checkpoint since the last time, is lost for good.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from determined_ds.errors import EXIT_CRASHED
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.launch.resuming import Start
from determined_ds.protocol.checkpoint_files import newest_good_checkpoint
from determined_ds.protocol.conclusion import CRASH
from determined_ds.protocol.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Another launch.

    Args:
        start: Where it starts.
        message: For people: which of how many, from where, and why.
        lost: The rank that is lost for good; None where all start again.
    """

    start: Start
    message: str
    lost: int | None = None


@dataclass(kw_only=True)
class Restarts:
    """Counts the restarts of a run.

    Args:
        allowed: At most, >= 0.
        run_dir: The run directory.
        start: Where the first launch started.
        elastic: Whether the run can continue without a rank that is lost.
    """

    allowed: int
    run_dir: Path
    start: Start = field(default_factory=Start)
    elastic: bool = False
    _used: int = field(default=0, init=False)
    _before: tuple[int, str] | None = field(default=None, init=False)  # who ended it, after which checkpoint

    def after(self, outcome: Outcome) -> Restart | None:
        """Another launch after a crash; None where none is left, or where it could not get further."""
        why = self._why(outcome)
        if why is None:
            return None
        start, damages = self._next_start()
        checkpoint, origin = start.checkpoint, "step 0"
        if checkpoint is not None:
            origin = f"checkpoint {checkpoint.uuid} at batch {checkpoint.steps_completed}"
        rank = _ended_by(outcome)
        now = None if rank is None else (rank, checkpoint.uuid if checkpoint else "")
        lost = rank if self.elastic and now is not None and now == self._before else None
        if lost is None and self._used >= self.allowed:
            return None
        self._before = now if lost is None else None  # ranks are numbered anew without the lost one
        if lost is None:
            self._used += 1
            line = f"restart {self._used} of {self.allowed} from {origin}; it crashed: {why}"
        else:
            line = (
                f"rank {lost} is lost: it ended the run again, with no new checkpoint; from {origin}: {why}"
            )
        return Restart(start=start, message="\n".join([*(f"warning: {d}" for d in damages), line]), lost=lost)

    def _next_start(self) -> tuple[Start, list[str]]:
        """The newest good checkpoint of the run, and what is wrong with newer ones.

        Until the run has loaded the checkpoint that ``--resume`` named, it is that one again.
        """
        if any(each.path.is_dir() for each in self.start.superseded):
            return self.start, []
        good, damages = newest_good_checkpoint(RunDir(self.run_dir).checkpoints)
        if good is None and self.start.elsewhere:
            return self.start, damages
        # The reset optimizer is in the checkpoints since.
        resets = self.start.resets_optimizer and good == self.start.checkpoint
        start = replace(self.start, checkpoint=good, elsewhere=False, superseded=(), resets_optimizer=resets)
        return start, damages

    def _why(self, outcome: Outcome) -> str | None:
        """Why it crashed, in a line; None where it did not, or where another launch could not get further."""
        may = outcome.hang or (outcome.failures and may_get_further(outcome.failures[0]))
        if (
            self.elastic and not may
        ):  # of a device that is gone a rank reports an error as it starts, and no other does
            own = [failure for failure in outcome.failures if not failure.ended_by_us]
            may = len(own) == 1 and own[0].cause == CRASH
        return outcome.reason if may and not outcome.signals else None


def _ended_by(outcome: Outcome) -> int | None:
    """The rank that ended a run; None where it was not one alone."""
    if outcome.hang:
        return outcome.hang.behind[0] if len(outcome.hang.behind) == 1 else None
    return outcome.failures[0].rank if outcome.failures else None


def may_get_further(failure: Failure) -> bool:
    """Whether another launch may get further than the one that ended with this failure.

    So it may where the process was killed, e.g. for want of memory, or where the rank says so: see
    :func:`~determined_ds.runtime.master.ending.exit_code_of`, which decides it on a cluster too. What a rank has
    diagnosed would be the same again: a configuration that cannot run, a loss that is not finite, a checkpoint that
    cannot be written.
    """
    return failure.code < 0 or failure.exit_code == EXIT_CRASHED
