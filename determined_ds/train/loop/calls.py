"""Calls of a trial's ``train_batch``, with checks of what each takes, does and returns."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from determined_ds.errors import TrainingError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.trial import returned
from determined_ds.trial.author import failed, written_by_author

METHODS = ("train_batch", "loss")


class CountedBatches:
    """The micro-batches of a trial; ``taken`` counts those so far."""

    def __init__(self, trial: Any, batches: Iterator[Any]) -> None:
        self._trial = trial
        self._batches = batches
        self.taken = 0

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except Exception as error:
            raise _collated(self._trial, error) or error from error
        self.taken += 1
        return batch


class TrainCalls:
    """Calls ``train_batch`` as often as an optimizer step takes.

    Args:
        trial: The trial.
        context: Its context.
        batches: The micro-batches of this rank; None where it has no data loader.
    """

    def __init__(self, trial: Any, context: Any, batches: Iterator[Any] | None) -> None:
        self._trial = trial
        self._context = context
        self._batches = None if batches is None else CountedBatches(trial, batches)
        self._has_stepped = False
        self._one_micro_batch = not (context.use_pipeline_parallel or context._manual_grad_accumulation)

    def train(self, epoch: int, index: int) -> list[dict[str, Any]]:
        """One optimizer step: the metrics of each call, where this rank reports any.

        Raises:
            TrainingError: a call returned no metrics or took a wrong number of batches, or no engine made a step.
        """
        context = self._context
        before = [] if self._has_stepped else self._steps()
        found = []
        for _ in range(context.get_num_micro_batches_per_slot() if self._one_micro_batch else 1):
            metrics = self._call(epoch, index)
            HEART.beat()
            if context._mpu.should_report_metrics:
                found.append(_stated(returned.metrics(self._trial, metrics, *METHODS)))
        if context._manual_grad_accumulation and not context.use_pipeline_parallel:
            self._check_accumulated()
        if not self._has_stepped:
            self._has_stepped = True
            self._check_step(before)
        return found

    def _call(self, epoch: int, index: int) -> Any:
        batches = self._batches
        if batches is None or self._context.use_pipeline_parallel:  # a pipeline's engine takes what it needs
            return self._trial.train_batch(batches, epoch, index)
        before = batches.taken
        metrics = self._trial.train_batch(batches, epoch, index)
        taken = batches.taken - before
        if taken != 1 and (self._one_micro_batch or not taken):
            self._refuse_taken(taken)
        return metrics

    def _refuse_taken(self, taken: int) -> None:
        did = f"took {taken or 'no'} batch{'es' * (taken > 1)} from its iterator"
        if taken:
            expected = "one micro-batch a call: it is called gradient_accumulation_steps times for each step"
            fix = "call next(dataloader_iter) once; to take all of a step, context.disable_auto_grad_accumulation()"
        else:
            expected, fix = "one", "call next(dataloader_iter): the position in the data is counted by it"
        raise failed(self._trial, METHODS[0], None, expected, fix, did=did)

    def _check_accumulated(self) -> None:
        """After a call of a trial that accumulates by itself: it has made whole optimizer steps."""
        engine, accumulation = self._context.models[0], self._context.get_num_micro_batches_per_slot()
        rest = getattr(engine, "micro_steps", 0) % accumulation
        if rest:
            name, did = (
                written_by_author(self._trial, METHODS[0]),
                f"stopped after {rest} of {accumulation} micro-batches",
            )
            expected = f"gradient_accumulation_steps = {accumulation} of them a call: accumulation is the trial's own"
            fix = "call engine.step() once for each of them, or leave out context.disable_auto_grad_accumulation()"
            raise failed(self._trial, name, None, expected, fix, did=did)

    def _steps(self) -> list[int]:
        return [getattr(engine, "global_steps", -1) for engine in self._context.models]

    def _check_step(self, before: list[int]) -> None:
        """After the first batch: without a step of an engine, nothing would ever be trained."""
        if self._steps() == before and -1 not in before:
            name, did = written_by_author(self._trial, METHODS[0]), "trained nothing: no engine made a step"
            fix = "call engine.backward(loss) and engine.step() for each micro-batch"
            raise failed(self._trial, name, None, "an optimizer step a batch", fix, did=did)


def _stated(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None this time, which Determined leaves out of the mean too.

    Source: ``make_metrics`` in determined 0.38.1's ``util.py``.
    """
    if any(value is None for value in metrics.values()):
        return {name: value for name, value in metrics.items() if value is not None}
    return metrics


def _collated(trial: Any, error: Exception) -> TrainingError | None:
    """The error for samples that torch cannot put together into a batch; None for any other error.

    Source: ``default_collate`` in torch 2.13's ``utils/data/_utils/collate.py``, in this process or in a worker.
    """
    text = "".join(traceback.format_exception(error))
    if "_utils/collate.py" not in text:
        return None
    did = f"yields samples that do not make a batch: {text.rstrip().splitlines()[-1]}"
    expected = "samples of tensors, arrays, numbers, or dicts and tuples of them, all of one shape"
    fix = "return the same from each sample of the dataset, or give the loader a collate_fn"
    return failed(trial, "build_training_data_loader", None, expected, fix, did=did)
