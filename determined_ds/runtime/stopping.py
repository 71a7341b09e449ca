"""When to ask whether to stop, and what to stop for."""

from __future__ import annotations

import time
from typing import Any

import torch

from determined_ds.errors import TrainingError

ASK_EVERY_S = 5.0


class StopRequests:
    """Asks for preemption, and for the trial's own wish to stop, in step on all ranks.

    At every boundary, and at least every :data:`ASK_EVERY_S` seconds whatever the periods: the chief measures how
    many batches that is, and says at each asking when the next will be, so that no batch in between pays for it.

    Args:
        context: The trial's context.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._next = 0
        self._asked_at_batch = 0
        self._asked_at_s = time.monotonic()

    def start(self, batches_trained: int) -> None:
        """Training begins after this batch; the first asking is after the next one."""
        self._next = batches_trained + 1
        self._asked_at_batch, self._asked_at_s = batches_trained, time.monotonic()

    def due(self, batches_trained: int) -> bool:
        """Whether it is time to ask, boundary or not."""
        return batches_trained >= self._next

    def ask(self, batches_trained: int) -> bool:
        """Whether to stop; a collective."""
        stop = bool(self._context._core.preempt.should_preempt())
        now = time.monotonic()
        batches = max(1, batches_trained - self._asked_at_batch)
        batch_s = max(1e-6, (now - self._asked_at_s) / batches)
        votes = self._context.distributed.allgather((self._context.get_stop_requested(), batch_s))
        # A quarter of the time, since the next batches may be slower than the last.
        self._next = batches_trained + max(1, int(ASK_EVERY_S / 4 / votes[0][1]))
        self._asked_at_batch, self._asked_at_s = batches_trained, now
        return stop or any(vote for vote, _ in votes)


class LossGuard:
    """Remembers, on the device, the first batch whose loss was not finite.

    Args:
        device: Of the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._never = self._first_bad.clone()

    def look(self, loss: Any, batch: int) -> None:
        """Look at the loss of batch ``batch`` (from 1) without waiting for it."""
        if isinstance(loss, torch.Tensor):
            bad = ~torch.isfinite(loss.detach()).all()
            this = torch.where(bad, batch, self._never)
            self._first_bad = torch.where(self._first_bad < 0, this, self._first_bad)
        elif isinstance(loss, float) and loss - loss != 0.0 and int(self._first_bad) < 0:
            self._first_bad = torch.full_like(self._never, batch)

    @property
    def flag(self) -> torch.Tensor:
        """1.0 where a loss was not finite, else 0.0; on the device, to ride along with a reduction."""
        return (self._first_bad >= 0).double()

    def stop(self, distributed: Any, last_checkpoint: str) -> None:
        """Stop the run; a collective, called by all ranks when any of them has seen such a loss.

        Raises:
            TrainingError: always; names the batch and the ranks.
        """
        firsts = distributed.allgather(int(self._first_bad))
        batch = min(first for first in firsts if first >= 0)
        ranks = ", ".join(str(rank) for rank, first in enumerate(firsts) if first == batch)
        kept = (
            f"the last good checkpoint is {last_checkpoint}"
            if last_checkpoint
            else "no checkpoint was made yet"
        )
        raise TrainingError(
            f"the loss was not finite at batch {batch}, on rank {ranks}: {kept}. Lower the learning rate, warm up "
            "longer, clip gradients, or look at the data of that batch; fit.stop_on_nan: false goes on regardless"
        )
