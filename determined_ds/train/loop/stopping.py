"""Stop requests, checkpoints that are due by the clock, and losses and validations that are not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from determined_ds.errors import NotFiniteError
from determined_ds.train.group.collectives import reduce_over_ranks

ASK_EVERY_S = 5.0


class CheckpointClock:
    """When a checkpoint is due by the time since the last one, or since training began in this process.

    Args:
        period: Of ``fit.checkpoint_period``; None, or a number of batches or epochs, where no clock decides.
    """

    def __init__(self, period: Any = None) -> None:
        self._period_s = period.total_seconds() if isinstance(period, timedelta) else math.inf
        self.restart()

    def restart(self) -> None:
        """A checkpoint is written."""
        self._since = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds until one is due; 0 where it is."""
        return max(0.0, self._period_s - (time.monotonic() - self._since))


# The same while a checkpoint is written, so that it is soon complete.
ASK_WRITERS_EVERY_S = 0.25


class StopRequests:
    """Asks what only some ranks know, at the same batch on all of them.

    That is whether to stop (preemption, and the trial's wish), whether a checkpoint is due (by the chief's clock), and
    whether every rank has written its files of one that is written while training continues.

    At every boundary, and at least every :data:`ASK_EVERY_S` seconds: the chief measures how many batches that is, and
    all ranks learn with each answer when to ask next, so the batches in between cost nothing. Asking is a few numbers
    in a reduction, which may be one that is made anyway.

    Args:
        context: Of the ranks.
        clock: Says when a checkpoint is due.
        checkpoints: Says whether one is being written, and whether this rank has written it.
    """

    def __init__(self, context: Any, clock: CheckpointClock | None = None, checkpoints: Any = None) -> None:
        self._context = context
        self._clock = clock or CheckpointClock()
        self._checkpoints = checkpoints
        self._is_chief = context.distributed.rank == 0
        self.requested = False
        self.checkpoint_due = False
        self.is_written = False
        self._next = 0
        self._asked_at_batch = 0
        self._asked_at_s = time.monotonic()

    @property
    def reason(self) -> str:
        """Why the run stops, as the chief knows it."""
        return getattr(self._context._core.preempt, "reason", "") or "as requested"

    def start(self, batches_trained: int) -> None:
        """Training begins after this batch; ask first after the next one."""
        self._next, self.checkpoint_due = batches_trained + 1, False
        self._clock.restart()
        self._asked_at_batch, self._asked_at_s = batches_trained, time.monotonic()

    def due(self, batches_trained: int) -> bool:
        """Whether it is time to ask, boundary or not."""
        return batches_trained >= self._next

    def vote(self, batches_trained: int) -> torch.Tensor:
        """This rank's numbers, to be summed over ranks: whether to stop, and of the chief the rest.

        That is whether it still writes, how many batches to train until the next question, and whether a checkpoint is
        due.
        """
        stop, wait, checkpoint = bool(self._context.get_stop_requested()), 0, False
        pending = self._checkpoints is not None and self._checkpoints.batch_in_writing is not None
        still_writes = not (pending and self._checkpoints.is_written)
        if self._is_chief:
            stop = bool(self._context._core.preempt.should_preempt()) or stop
            batches = max(1, batches_trained - self._asked_at_batch)
            batch_s = max(1e-6, (time.monotonic() - self._asked_at_s) / batches)
            left_s = self._clock.left_s
            checkpoint = left_s == 0
            # A quarter of the time, since the next batches may be slower than the last.
            every_s = ASK_WRITERS_EVERY_S if pending else ASK_EVERY_S / 4
            wait = max(1, int(min(every_s, left_s or math.inf) / batch_s))
        numbers = [float(stop), float(wait), float(checkpoint), float(still_writes)]
        return torch.tensor(numbers, dtype=torch.float64, device=self._context.device)

    def count(self, votes: list[float], batches_trained: int) -> None:
        """Take in the summed votes: whether to stop, when to ask next, whether a checkpoint is due or is written."""
        stop, wait, checkpoint, still_write = votes
        self.is_written = still_write == 0
        self.requested = self.requested or stop > 0
        self.checkpoint_due = checkpoint > 0
        self._next = batches_trained + int(wait)
        self._asked_at_batch, self._asked_at_s = batches_trained, time.monotonic()

    def ask(self, batches_trained: int) -> None:
        """Vote by a separate reduction; a collective."""
        votes = self.vote(batches_trained)
        reduce_over_ranks(votes)
        self.count(votes.tolist(), batches_trained)


class LossGuard:
    """Remembers, on the device, the first batch whose loss was not finite."""

    def __init__(self, device: torch.device) -> None:
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def look(self, loss: torch.Tensor | None, batch: int) -> None:
        """Check the loss of batch ``batch`` (from 1), or a sum that holds it, without waiting for the device.

        Args:
            loss: A scalar; None where the trial reports no loss.
            batch: Its number, from 1.
        """
        if loss is not None:
            new = (self._first_bad < 0) & ~torch.isfinite(loss)
            self._first_bad = torch.where(new, batch, self._first_bad)

    @property
    def flag(self) -> torch.Tensor:
        """1.0 where a loss was not finite, else 0.0; on the device, to be part of a reduction."""
        return (self._first_bad >= 0).double()

    def stop(self, distributed: Any, last_checkpoint: str) -> None:
        """Stop the run; a collective, called by all ranks when any of them has found such a loss.

        Raises:
            NotFiniteError: always; names the batch and the ranks.
        """
        firsts = distributed.allgather(int(self._first_bad))
        batch = min(first for first in firsts if first >= 0)
        at = [str(rank) for rank, first in enumerate(firsts) if first == batch]
        raise NotFiniteError(
            f"the loss was not finite at batch {batch}, on rank{'s' * (len(at) > 1)} {', '.join(at)}: "
            f"{_kept(last_checkpoint)}. Lower the learning rate, warm up longer, clip gradients, or check the data of "
            "that batch; fit.stop_on_nan: false continues regardless"
        )


def not_finite_validation(names: Sequence[str], searched: str, batch: int, last_checkpoint: str) -> str:
    """The message about a validation that was not finite.

    Args:
        names: The metrics that were not.
        searched: ``searcher.metric``; among the names, it is the one that the run stops for.
        batch: Batches trained before it.
        last_checkpoint: Uuid of the last checkpoint; "" where there is none.
    """
    said = f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} not finite in the validation at batch {batch}"
    if searched not in names:
        return f"{said}: check how the trial computes {'it' if len(names) == 1 else 'them'}"
    return (
        f"{said}: {_kept(last_checkpoint)}. It is never the best. Lower the learning rate, or check the validation "
        f"data and how {searched} is computed; fit.stop_on_nan: false continues regardless"
    )


def _kept(last_checkpoint: str) -> str:
    return (
        f"the last good checkpoint is {last_checkpoint}" if last_checkpoint else "no checkpoint was made yet"
    )
