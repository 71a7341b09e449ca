"""When something is due after a batch: by the number of batches, by the clock, as requested, or for a bad loss."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from determined_ds.config.params import Duration, FitOptions, Length
from determined_ds.errors import ConfigError, Problem
from determined_ds.train.group.process_group import gather_rows

ASK_EVERY_S = 5.0
# The same while a checkpoint is written, so that it is soon complete.
ASK_WRITERS_EVERY_S = 0.25
LENGTHS = ("max_length", "validation_period", "checkpoint_period", "reporting_period")
MOST_LOSSES = 64  # that are looked at together
VOTES = 4  # numbers of a vote
NONE = -1.0  # batch of a rank whose losses were all finite


@dataclass(frozen=True, kw_only=True)
class Due:
    """What is due after a batch."""

    report: bool = False
    validate: bool = False
    checkpoint: bool = False
    end: bool = False

    def __bool__(self) -> bool:
        return self.report or self.validate or self.checkpoint or self.end


class Schedule:
    """When a run reports, validates, checkpoints and ends: every period counts from the start of training."""

    def __init__(self, fit: FitOptions, batches_per_epoch: int | None) -> None:
        self._fit, self.batches_per_epoch = fit, batches_per_epoch
        lengths = {name: getattr(fit, name) for name in LENGTHS}
        in_epochs = {name: each.value for name, each in lengths.items() if each and each.unit == "epochs"}
        self.in_epochs = bool(in_epochs)
        if batches_per_epoch is None and in_epochs:
            message, code = "the training data has no length, and so no epochs", "epochs-without-length"
            fix = "count in batches: {batches: 1000}, or give the dataset a __len__"
            raise ConfigError(
                Problem(key=f"fit.{name}", value=f"{value} epochs", message=message, fix=fix, code=code)
                for name, value in in_epochs.items()
            )
        self._batches_of, length = {"batches": 1, "epochs": batches_per_epoch or 1}, fit.max_length
        self.stated_batches = None if length is None else int(length.value) * self._batches_of[length.unit]  # type: ignore[arg-type]
        self.num_batches = self.stated_batches or sys.maxsize

    def epoch_of(self, batch: int) -> tuple[int, bool, bool]:
        """The epoch of a batch (from 0), and whether it is its first and its last; one endless epoch without epochs."""
        if self.batches_per_epoch is None:
            return 0, batch == 0, False
        epoch, inside = divmod(batch, self.batches_per_epoch)
        return epoch, inside == 0, inside == self.batches_per_epoch - 1

    def due(self, batches_trained: int) -> Due:
        """What is due after ``batches_trained`` batches (>= 1). At the end everything is."""
        end, fit = batches_trained >= self.num_batches, self._fit

        def is_reached(period: Length | Duration | None) -> bool:
            if end or period is None or isinstance(period, Duration):
                return end
            count, inside = divmod(batches_trained, self._batches_of[period.unit])
            is_it = count % period.value == 0 if isinstance(period.value, int) else count in period.value
            return is_it and not inside

        report, validate = is_reached(fit.reporting_period), is_reached(fit.validation_period)
        return Due(report=report, validate=validate, checkpoint=is_reached(fit.checkpoint_period), end=end)


class StopRequests:
    """Asks what only some ranks know, at the same batch on all of them, by a few numbers in a collective.

    That is whether to stop (preemption, and the trial's wish), whether a checkpoint is due (by the chief's clock), and
    whether every rank has written its files of one that is written while training continues. At every boundary, and at
    least every :data:`ASK_EVERY_S` seconds: the chief measures how many batches that is, and all ranks learn with each
    answer when to ask next, so the batches in between cost nothing.
    """

    def __init__(self, context: Any, period: Length | Duration | None, checkpoints: Any) -> None:
        self._context, self._checkpoints = context, checkpoints
        self._period_s = period.seconds if isinstance(period, Duration) else math.inf
        self.requested = self.is_written = False
        self.start(0)

    def start(self, batches_trained: int) -> None:
        """Training begins after this batch; ask first after the next one."""
        self.next_batch, self.checkpoint_due = batches_trained + 1, False
        self._batch_s = math.inf  # seconds of a batch of late
        # The next checkpoint by the clock is due a period after ``saved_s``.
        self._asked_at_batch, self._asked_at_s = batches_trained, time.monotonic()
        self.saved_s = self._asked_at_s

    def vote(self, batches_trained: int) -> torch.Tensor:
        """This rank's numbers: whether it wants to stop, and whether it still writes.

        Of the chief also how many batches to train until the next question, and whether a checkpoint is due.
        """
        stop, wait, checkpoint = bool(self._context.get_stop_requested()), 0, False
        pending = self._checkpoints.batch_in_writing is not None
        if self._context.distributed.rank == 0:
            stop = bool(self._context._core.preempt.should_preempt()) or stop
            now = time.monotonic()
            if trained := batches_trained - self._asked_at_batch:
                self._batch_s = max(1e-6, (now - self._asked_at_s) / trained)
            left_s = max(0.0, self._period_s - (now - self.saved_s))
            checkpoint = left_s == 0
            # A quarter of the time, since the next batches may be slower than the last.
            every_s = ASK_WRITERS_EVERY_S if pending else ASK_EVERY_S / 4
            wait = max(1, int(min(every_s, left_s or math.inf) / self._batch_s))
        numbers = [stop, wait, checkpoint, not (pending and self._checkpoints.is_written)]
        return torch.tensor(numbers, dtype=torch.float64, device=self._context.device)

    def count(self, votes: Sequence[Sequence[float]], batches_trained: int) -> None:
        """Take in the votes of all ranks: whether to stop, when to ask next, whether a checkpoint is due or written."""
        stop, wait, checkpoint, still_write = map(sum, zip(*votes, strict=True))
        self.is_written, self.checkpoint_due = not still_write, checkpoint > 0
        self.requested = self.requested or stop > 0
        self.next_batch = batches_trained + int(wait)
        self._asked_at_batch, self._asked_at_s = batches_trained, time.monotonic()

    def ask(self, batches_trained: int) -> None:
        """Vote by a separate collective."""
        self.count(gather_rows(self.vote(batches_trained)).tolist(), batches_trained)


class LossGuard:
    """Remembers, on the device, the first batch whose loss was not finite."""

    def __init__(self, device: torch.device) -> None:
        self._first_bad = torch.full((), NONE, dtype=torch.float64, device=device)
        self._losses: dict[int, torch.Tensor] = {}

    def look(self, loss: torch.Tensor | None, batch: int) -> None:
        """Check the loss of batch ``batch`` (from 1), or a sum that holds it, for many steps at once."""
        if loss is not None:
            self._losses[batch] = loss
            if len(self._losses) >= MOST_LOSSES:
                self.first_bad()

    def first_bad(self) -> torch.Tensor:
        """The first batch whose loss was not finite, else :data:`NONE`; on the device, to ride in a collective."""
        if self._losses:
            device = self._first_bad.device
            bad = ~torch.isfinite(torch.stack([loss.to(device) for loss in self._losses.values()]))
            batches = torch.tensor(list(self._losses), dtype=torch.float64, device=device)
            is_new = (self._first_bad == NONE) & bad.any()
            self._first_bad = torch.where(is_new, batches[bad.to(torch.int8).argmax()], self._first_bad)
            self._losses.clear()
        return self._first_bad
