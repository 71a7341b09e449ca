"""What an author's code does in a step: the calls of ``train_batch``, and what it must not do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from determined_ds.callbacks import Callback
from determined_ds.errors import TrainingError
from determined_ds.rundir.signals import HEART
from determined_ds.trial import returned
from determined_ds.trial.author import failed

METHODS = ("train_batch", "loss")


def built_callbacks(trial: Any, context: Any) -> dict[str, Any]:
    """What ``build_callbacks`` returns; those of this library's kind are introduced to the engines."""
    fix = "call it on the engine"
    if hasattr(trial, "build_model"):
        fix = "call super().__init__(context) first"
    called = "context.wrap_model_engine(engine)"
    returned.check(bool(context.models), trial, "__init__", None, called, fix, "wrapped no engine")
    found = returned.callbacks(trial, trial.build_callbacks())
    for callback in found.values():
        if isinstance(callback, Callback):
            callback.attach(context.models)
    return dict(found)


class TrainCalls:
    """Calls ``train_batch`` as often as an optimizer step takes, and counts the micro-batches that it takes."""

    def __init__(self, trial: Any, context: Any, batches: Iterator[Any] | None) -> None:
        self._trial, self._context, self._batches = trial, context, batches
        self._taken = 0
        # A pipeline's engine, and an author who accumulates, take all micro-batches of a step in one call.
        self._is_one = not (context.use_pipeline_parallel or context._manual_grad_accumulation)
        self._accumulation = context.get_num_micro_batches_per_slot()
        self._has_stepped = False

    def __iter__(self) -> TrainCalls:
        return self

    def __next__(self) -> Any:
        assert self._batches is not None
        batch = next(self._batches)
        self._taken += 1
        return batch

    def train(self, epoch: int, index: int) -> list[dict[str, Any]]:
        """One optimizer step: the metrics of each call, where this rank reports any."""
        context, trial, found = self._context, self._trial, []
        before = [getattr(engine, "global_steps", -1) for engine in context.models]
        for _ in range(self._accumulation if self._is_one else 1):
            taken_before = self._taken
            metrics = trial.train_batch(None if self._batches is None else self, epoch, index)
            HEART.beat()
            taken = self._taken - taken_before
            counts = self._batches is not None and not context.use_pipeline_parallel
            if counts and taken != 1 and (self._is_one or not taken):
                did = f"took {taken or 'no'} batch{'es' * (taken > 1)} from its iterator"
                fix = "call next(dataloader_iter) once; to take all micro-batches of a step in one call, "
                fix += "context.disable_auto_grad_accumulation()"
                raise failed(trial, METHODS[0], None, "one micro-batch a call", fix, did=did)
            if context._mpu.should_report_metrics:
                metrics = returned.metrics(trial, metrics, *METHODS)
                # Source: ``make_metrics`` in determined 0.38.1's ``util.py`` leaves None out of the mean, too.
                found.append({name: value for name, value in metrics.items() if value is not None})
        rest = getattr(context.models[0], "micro_steps", 0) % self._accumulation
        if rest and context._manual_grad_accumulation and not context.use_pipeline_parallel:
            did = f"stopped after {rest} of {self._accumulation} micro-batches"
            fix = "call engine.step() once for each of them, or leave out context.disable_auto_grad_accumulation()"
            raise failed(trial, METHODS[0], None, "all micro-batches of a step", fix, did=did)
        has_stepped = before != [getattr(engine, "global_steps", -1) for engine in context.models]
        if not self._has_stepped and -1 not in before and not has_stepped:
            did, fix = (
                "trained nothing: no engine made a step",
                "call engine.backward(loss) and engine.step()",
            )
            raise failed(trial, METHODS[0], None, "an optimizer step a batch", fix, did=did)
        self._has_stepped = True
        return found


def parameters_of(engines: Sequence[Any]) -> list[tuple[Any, str, Any, bool]]:
    """Each engine's parameters, their names, and whether they require a gradient, for :func:`check_frozen`."""
    return [
        (engine, name, each, each.requires_grad)
        for engine in engines
        for name, each in engine.module.named_parameters()
    ]


def check_frozen(parameters: list[tuple[Any, str, Any, bool]]) -> None:
    """Refuse a parameter that was frozen or unfrozen since, where the engine would not follow.

    Under ZeRO 1 to 3 a parameter that is frozen later still moves, by the momentum and the weight decay of the flat
    partition that it is in, and one that is unfrozen never trains (measured, AdamW, deepspeed 0.19.8).
    """
    for engine, name, each, was_on in parameters:
        if each.requires_grad != was_on:
            optimizer = getattr(engine, "optimizer", None)
            groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
            # torch's own optimizer leaves out a parameter without a gradient.
            if not any(each is own for group in groups for own in group["params"]):
                raise TrainingError(
                    f"{name} was {'frozen' if was_on else 'unfrozen'} in training, and the engine does not follow\n"
                    "  fix: let it require a gradient in build_model, put it into a group of its own in "
                    "build_parameters, and give that group a rate of 0 for these steps: LambdaLR in build_scheduler"
                )
