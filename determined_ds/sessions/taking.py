"""Counts what a script takes, and does the loop's work between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from determined import pytorch

from determined_ds.errors import TrainingError
from determined_ds.sessions.stepped_loop import SteppedLoop

# Passes that a script may begin after the end of training: for epoch in range(n). One that begins more never ends.
MOST_EMPTY = 1000


class Pass:
    """A pass over the training data, iterated by the script.

    Args:
        drive: What it drives.
        number: Of all passes that the script has begun, in this process or before.
    """

    def __init__(self, drive: Drive, number: int) -> None:
        self._drive = drive
        self.number = number
        self.is_over = False
        self.is_whole = False  # it is over because the data is at its end

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        return self._drive.fetch(self)


class Drive:
    """Drives the loop by what the script takes.

    A step lasts until the next batch is taken: what the script does after ``engine.step()``, a validation included,
    belongs to it, and is in its checkpoint. So a run always resumes where a batch is taken. At the end of a pass the
    next batch is that of the next pass, and at the end of training there is none: there the step ends with the
    session.

    Args:
        loop: Its checkpoint is loaded.
        position: What that checkpoint says of the script; empty without one.
        accumulation: Micro-batches of a rank in a step.
    """

    def __init__(self, loop: SteppedLoop, position: dict[str, int], accumulation: int) -> None:
        self._loop = loop
        self._accumulation = accumulation
        self._batches: Iterator[Any] | None = None
        self._is_open = False
        self._resumed = loop.batches_trained > 0
        self._taken = 0  # micro-batches of the step at hand
        self._length: pytorch.TrainUnit | None = None  # as the script says
        self._begun = 0  # passes
        self._pass: Pass | None = None
        self._fetches = False
        self._cut: int | None = None  # number of the pass that the end of training has cut
        self._empty = 0  # passes begun after the end of training
        self._done = position.get("passes", 0)
        self._epoch = position.get("epochs", 0)
        self._in_epochs = False
        self._begun_before_epoch = position.get("before_epoch", 0)

    @property
    def is_replaying(self) -> bool:
        """Whether the script is going through what it has done before the checkpoint."""
        return self._resumed and not self._is_open

    @property
    def listens(self) -> bool:
        """Whether a report belongs to a step: not before the first one of a resumed run, nor after the last one."""
        return not self.is_replaying and (self._has_step or not self._is_open or self._loop.goes_on)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop was requested, and its checkpoint is written."""
        return self._loop.is_stopped

    @property
    def was_driven(self) -> bool:
        """Whether a batch was taken, here or before."""
        return self._resumed or self._is_open

    @property
    def _has_step(self) -> bool:
        """Whether all of a step was taken, and the step has not ended."""
        return self._taken == self._accumulation

    def pause(self) -> None:
        """What follows is not training."""
        if self._is_open:
            self._loop.pause()

    def position(self) -> dict[str, int]:
        """What the script has finished, as a checkpoint holds it."""
        if self._cut is not None:
            return {"passes": self._cut, "epochs": self._epoch, "before_epoch": self._begun_before_epoch}
        if self._pass is None:
            return {"passes": self._done, "epochs": self._epoch, "before_epoch": self._begun_before_epoch}
        at_hand = self._fetches  # one that the script has left early is finished
        epoch = self._epoch + (self._in_epochs and not at_hand)
        before = self._begun_before_epoch if at_hand else self._pass.number + 1
        return {"passes": self._pass.number + (not at_hand), "epochs": epoch, "before_epoch": before}

    # ------------------------------------------------------------------------------------ passes

    def new_pass(self) -> Pass:
        """Begin a pass; one that was finished before the checkpoint is empty."""
        self._begun += 1
        return Pass(self, self._begun - 1)

    def epochs(self, num: int) -> Iterator[int]:
        """The epochs that are not finished, until the end of training or a stop."""
        self._length = pytorch.Epoch(num)
        self._in_epochs = True
        if self._resumed:
            self._begun = max(self._begun, self._begun_before_epoch)
        while self._epoch < num and not (self._is_open and not self._loop.goes_on):
            self._begun_before_epoch = self._begun
            yield self._epoch
            if self._epoch + 1 < num:
                self._end_step(agreed=True)
            if self._is_open and not self._loop.goes_on:
                return
            if self._epoch + 1 == num:
                return
            self._epoch += 1

    def fetch(self, one: Pass) -> Any:
        """The next micro-batch of a pass; first of all, end the step before it.

        Raises:
            StopIteration: the pass is over, training is at its end, or a stop was requested.
            SystemExit: a pass was begun after a stop, or very many after the end of training; or all that is measured
            was.
        """
        if one.is_over or one.number < self._done:
            raise StopIteration
        is_new = one is not self._pass
        if is_new:
            self._leave_after_stop()
            if self._pass is not None:
                self._pass.is_over = True
            self._pass = one
        elif self._has_step and self._is_last(one):
            one.is_over = True
            self._cut = None if one.is_whole else one.number
            self._loop.pause()
            self._leave_at_end()
            raise StopIteration
        self._open()
        self._fetches = True
        self._end_step(agreed=is_new)
        self._fetches = False
        if not self._loop.goes_on:
            one.is_over = True
            self._count_empty(is_new)
            raise StopIteration
        return self._take()

    def _count_empty(self, is_new: bool) -> None:
        """End a script that iterates the loader for ever, though training is over."""
        self._empty += is_new
        if self._empty > MOST_EMPTY:
            raise SystemExit(0)

    def _is_last(self, one: Pass) -> bool:
        """Whether the step at hand is the last one of a pass, or of training."""
        done, length = self._loop.batches_trained + 1, self._loop.length
        one.is_whole = done % self._loop.per_pass == 0
        return one.is_whole or (length is not None and done >= length)

    def _take(self) -> Any:
        if not self._taken:
            self._loop.begin_step()
        assert self._batches is not None, "every rank but a pipeline's loads"
        batch = next(self._batches)
        self._taken += 1
        return batch

    # ------------------------------------------------------------------------------------ steps

    def steps(self, num: int | None) -> Iterator[Any]:
        """For each step that is left, an iterator over its micro-batches; None on ranks that load none."""
        if num is not None:
            self._length = pytorch.Batch(num)
        self._leave_after_stop()
        self._open()
        while True:
            self._end_step(agreed=False)
            if not self._loop.goes_on or (num is not None and self._loop.batches_trained >= num):
                return
            if self._batches is None:
                self._loop.begin_step()
                self._taken = self._accumulation
                yield None
            else:
                yield self._of_step()
                if not self._has_step:
                    raise TrainingError(
                        f"{self._taken} of {self._accumulation} micro-batches of a step were taken\n  fix: take all of "
                        "them: engine.train_batch(data_iter=batches) for each iterator of s.steps()"
                    )
            length, done = self._loop.length, self._loop.batches_trained + 1
            if done in (num, length):
                self._loop.pause()
                self._leave_at_end()
                return

    def _of_step(self) -> Iterator[Any]:
        while not self._has_step:
            yield self._take()

    # ------------------------------------------------------------------------------------ between steps

    def _leave_after_stop(self) -> None:
        """End a script that trains on after a stop; it was given the chance to end by itself."""
        if self._loop.is_stopped:
            raise SystemExit(0)

    def _leave_at_end(self) -> None:
        """End a script that is measured with its last step: what it would do next is not wanted."""
        if self._loop.ends_script and self._loop.batches_trained + 1 == self._loop.length:
            raise SystemExit(0)

    def _open(self) -> None:
        if not self._is_open:
            self._batches = self._loop.begin_with(self._length)
            self._is_open = True

    def _end_step(self, *, agreed: bool, ends: bool = False) -> None:
        """End the step at hand, if all of it was taken; see :meth:`SteppedLoop.finish_step`."""
        if self._has_step:
            self._taken = 0
            self._loop.finish_step(agreed=agreed, ends=ends)

    def close(self) -> None:
        """The script is done: end its last step, and the loop; a collective."""
        if not self._is_open:
            return
        if self._taken and (self._loop.is_untouched or not self._has_step):
            self._loop.end_without(self._taken, self._accumulation)
        else:
            self._end_step(agreed=True, ends=True)
        self._loop.end()

    def report(self, metrics: Any, *, validation: bool, weight: float) -> None:
        """Take metrics of the step at hand; those of what was done before are ignored."""
        if not self.listens:
            return
        if validation:
            self._loop.report_validation(metrics, weight)
        else:
            self._loop.take(metrics)

    def request_checkpoint(self, place: str) -> None:
        """Have a checkpoint written when the step ends; ``place`` is the file and line that wants it."""
        if self.listens:
            self._loop.wanted_at = place
