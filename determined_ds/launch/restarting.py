"""``max_restarts`` without a cluster: a run that crashed is restarted from its newest good checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from determined_ds.checkpoints.files import newest_good_checkpoint
from determined_ds.errors import EXIT_CRASHED
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.launch.resuming import Start
from determined_ds.rundir.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Another launch.

    Args:
        start: Where it starts.
        message: For people: which of how many, from where, and why.
    """

    start: Start
    message: str


@dataclass(kw_only=True)
class Restarts:
    """Counts the restarts of a run.

    Args:
        allowed: At most, >= 0.
        run_dir: The run directory.
        start: Where the first launch started.
    """

    allowed: int
    run_dir: Path
    start: Start = field(default_factory=Start)
    _used: int = field(default=0, init=False)

    def after(self, outcome: Outcome) -> Restart | None:
        """Another launch after a crash; None where none is left, or where it could not get further.

        It may where nothing moved, where the process was killed, e.g. for want of memory, or where the rank says so:
        see :func:`~determined_ds.train.master.ending.exit_code_of`, which decides it on a cluster too. What a rank
        has diagnosed would be the same again: a configuration that cannot run, a loss that is not finite.
        """
        first = outcome.failures[0] if outcome.failures else None
        may = outcome.hang or (first and (first.code < 0 or first.exit_code == EXIT_CRASHED))
        if not may or outcome.signals or self._used >= self.allowed:
            return None
        start, damages = self._next_start()
        self._used += 1
        origin = "step 0"
        if start.checkpoint is not None:
            origin = f"checkpoint {start.checkpoint.uuid} at batch {start.checkpoint.steps_completed}"
        line = f"restart {self._used} of {self.allowed} from {origin}; it crashed: {outcome.reason}"
        return Restart(start=start, message="\n".join([*(f"warning: {d}" for d in damages), line]))

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
