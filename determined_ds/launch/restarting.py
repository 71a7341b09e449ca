"""``max_restarts`` without a cluster: what crashed is started again from its newest good checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from determined_ds.errors import EXIT_CRASHED
from determined_ds.launch.ranks.failures import words_of
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.start import Outcome
from determined_ds.launch.trial_process import reason_of
from determined_ds.protocol.checkpoint_files import Checkpoint, newest_good_checkpoint
from determined_ds.protocol.run_dir import CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Another start.

    Args:
        checkpoint: To go on from; None: from the beginning.
        message: For people: which of how many, from where, and why.
    """

    checkpoint: Checkpoint | None
    message: str


@dataclass(kw_only=True)
class Restarts:
    """Counts the restarts of a run.

    Args:
        allowed: At most, >= 0.
        run_dir: The run directory.
    """

    allowed: int
    run_dir: Path
    _used: int = field(default=0, init=False)

    def after(self, outcome: Outcome) -> Restart | None:
        """Another start after a crash; None where there is no more, or where it could not come further."""
        why = self._why(outcome)
        if why is None or self._used >= self.allowed:
            return None
        self._used += 1
        good, damages = newest_good_checkpoint(self.run_dir / CHECKPOINTS)
        origin = f"checkpoint {good.uuid} at batch {good.steps_completed}" if good else "the beginning"
        lines = [f"restart {self._used} of {self.allowed} from {origin}; it crashed: {why}"]
        return Restart(checkpoint=good, message="\n".join([*(f"warning: {d}" for d in damages), *lines]))

    def _why(self, outcome: Outcome) -> str | None:
        """Why it crashed, in a line; None where it did not, or where another start could not come further."""
        if outcome.signals:
            return None
        if outcome.hang:
            return f"no rank got any further for {outcome.hang.seconds:.0f} s"
        if not outcome.failures or not may_come_further(outcome.failures[0]):
            return None
        return reason_of(words_of(outcome.failures[0]))


def may_come_further(failure: Failure) -> bool:
    """Whether another start of a failed rank may come further than this one.

    So it may where the system or somebody else ended it, e.g. for want of memory, or where it says so itself: see
    :func:`~determined_ds.runtime.master.ending.exit_code_of`, which decides it on a cluster too. What a rank has
    diagnosed is the same next time: a configuration that cannot run, a loss that is not finite, a
    checkpoint that cannot be written.
    """
    return failure.code < 0 or failure.exit_code == EXIT_CRASHED
