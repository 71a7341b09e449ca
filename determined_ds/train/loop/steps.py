"""What an author's code does in a step: calls of ``train_batch``, ``on_step_end``, and parameters that are frozen.

A parameter whose ``requires_grad`` is turned off in training still moves under ZeRO 1 to 3, by the momentum and the
weight decay of the flat partition that it is in (measured, AdamW, deepspeed 0.19.8). One that was off when the engine
was made never trains under ZeRO 3, and fails under ZeRO 1 and 2. So a whole group of parameters is kept out of the
optimizer's step, and no gradient is computed for it; outside of the step all is as it was built.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import util

from determined_ds.callbacks import Callback
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.rundir.heartbeat import HEART
from determined_ds.trial import returned
from determined_ds.trial.author import described, failed, method_of, written_by_author
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDP, engine_name

METHODS = ("train_batch", "loss")
HOOK = "on_step_end"
NAME = "frozen"
REQUIRES_GRAD = operator.attrgetter("requires_grad")
GROUP_FIX = "make them a group of their own in build_parameters: [{'params': [...]}, {'params': [...]}]"


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
            # Source: ``default_collate`` in torch 2.13's ``utils/data/_utils/collate.py``, here or in a worker.
            text = "".join(traceback.format_exception(error))
            if "_utils/collate.py" not in text:
                raise
            did = f"yields samples that do not make a batch: {text.rstrip().splitlines()[-1]}"
            expected = "samples of tensors, arrays, numbers, or dicts and tuples of them, all of one shape"
            fix = "return the same from each sample of the dataset, or give the loader a collate_fn"
            raise failed(self._trial, "build_training_data_loader", None, expected, fix, did=did) from error
        self.taken += 1
        return batch


class TrainCalls:
    """Calls ``train_batch`` as often as an optimizer step takes."""

    def __init__(self, trial: Any, context: Any, batches: Iterator[Any] | None) -> None:
        self._trial = trial
        self._context = context
        self._batches = None if batches is None else CountedBatches(trial, batches)
        self._has_stepped = False
        self._one_micro_batch = not (context.use_pipeline_parallel or context._manual_grad_accumulation)
        self._calls = context.get_num_micro_batches_per_slot() if self._one_micro_batch else 1

    def train(self, epoch: int, index: int) -> list[dict[str, Any]]:
        """One optimizer step: the metrics of each call, where this rank reports any.

        Raises:
            TrainingError: a call returned no metrics or took a wrong number of batches, or no engine made a step.
        """
        context = self._context
        before = [] if self._has_stepped else self._global_steps()
        found = []
        for _ in range(self._calls):
            metrics = self._call(epoch, index)
            HEART.beat()
            if context._mpu.should_report_metrics:
                metrics = returned.metrics(self._trial, metrics, *METHODS)
                if any(value is None for value in metrics.values()):
                    # Determined leaves them out of the mean, too (``make_metrics`` in determined 0.38.1's ``util.py``).
                    metrics = {name: value for name, value in metrics.items() if value is not None}
                found.append(metrics)
        if context._manual_grad_accumulation and not context.use_pipeline_parallel:
            accumulation = context.get_num_micro_batches_per_slot()
            if rest := getattr(context.models[0], "micro_steps", 0) % accumulation:
                did = f"stopped after {rest} of {accumulation} micro-batches"
                expected = f"gradient_accumulation_steps = {accumulation} of them a call"
                fix = "call engine.step() once for each of them, or leave out context.disable_auto_grad_accumulation()"
                raise self._failed(did, expected, fix)
        if not self._has_stepped:
            self._has_stepped = True
            if self._global_steps() == before and -1 not in before:  # nothing would ever be trained
                fix = "call engine.backward(loss) and engine.step() for each micro-batch"
                raise self._failed("trained nothing: no engine made a step", "an optimizer step a batch", fix)
        return found

    def _global_steps(self) -> list[int]:
        return [getattr(engine, "global_steps", -1) for engine in self._context.models]

    def _call(self, epoch: int, index: int) -> Any:
        batches = self._batches
        if batches is None or self._context.use_pipeline_parallel:  # a pipeline's engine takes what it needs
            return self._trial.train_batch(batches, epoch, index)
        before = batches.taken
        metrics = self._trial.train_batch(batches, epoch, index)
        taken = batches.taken - before
        if taken != 1 and (self._one_micro_batch or not taken):
            did = f"took {taken or 'no'} batch{'es' * (taken > 1)} from its iterator"
            expected, fix = "one", "call next(dataloader_iter): the position in the data is counted by it"
            if taken:
                expected = (
                    "one micro-batch a call: it is called gradient_accumulation_steps times for each step"
                )
                fix = "call next(dataloader_iter) once; to take all of a step, context.disable_auto_grad_accumulation()"
            raise failed(self._trial, METHODS[0], None, expected, fix, did=did)
        return metrics

    def _failed(self, did: str, expected: str, fix: str) -> TrainingError:
        return failed(self._trial, written_by_author(self._trial, METHODS[0]), None, expected, fix, did=did)


# ------------------------------------------------------------------------------------ after a step


class StepEnd:
    """Calls ``on_step_end(batch_idx, metrics)`` after each optimizer step."""

    def __init__(self, trial: Any, callbacks: Sequence[Any]) -> None:
        owners = [callback for callback in callbacks if callable(getattr(callback, HOOK, None))]
        if isinstance(trial, ReconciledTrial) and util.is_overridden(trial.on_step_end, ReconciledTrial):
            owners.insert(0, trial)
        self._hooks = [getattr(owner, HOOK) for owner in owners]
        self._taken: list[dict[str, Any]] = []

    def take(self, metrics: dict[str, Any]) -> None:
        """Keep the metrics of a micro-batch."""
        if self._hooks:
            self._taken.append(metrics)

    def call(self, batch_idx: int) -> None:
        """After a step, numbered from 0: hand on the mean of each metric; nothing is read from a device."""
        if not self._hooks:
            return
        columns: dict[str, list[Any]] = {}
        for metrics in self._taken:
            for name, value in metrics.items():
                value = value.detach() if isinstance(value, torch.Tensor) else value
                columns.setdefault(name, []).append(value)
        self._taken = []
        mean = {
            name: values[0] if len(values) == 1 else sum(values[1:], values[0]) / len(values)
            for name, values in columns.items()
        }
        for hook in self._hooks:
            hook(batch_idx, mean)


def attach(callbacks: Sequence[Any], engines: Sequence[Any]) -> None:
    """Introduce the engines to the callbacks that are of this library's kind."""
    for callback in callbacks:
        if isinstance(callback, Callback):
            callback.attach(engines)


# ------------------------------------------------------------------------------------ freezing


class Freezing:
    """Freezes what the trial's ``frozen`` names, step by step."""

    def __init__(self, trial: Any, engines: list[Any]) -> None:
        self._trial = trial
        self._engines = [_Engine(trial, engine) for engine in engines]
        is_ours = isinstance(trial, ReconciledTrial)
        self._is_used = is_ours and util.is_overridden(trial.frozen, ReconciledTrial)

    def begin(self, batch_idx: int) -> None:
        """Before a step: compute no gradients for what is frozen in it."""
        if not self._is_used:
            return
        value, expected = self._trial.frozen(batch_idx), "a list of modules and parameters"
        fix = "return modules or parameters: [self.engine.module.encoder]; [] freezes nothing"
        if isinstance(value, (torch.nn.Module, torch.Tensor, str)) or not isinstance(value, Iterable):
            raise failed(self._trial, NAME, value, expected, fix)
        wanted: set[int] = set()
        for each in value:
            if isinstance(each, torch.nn.Module):
                wanted |= {id(parameter) for parameter in each.parameters()}
            elif isinstance(each, torch.nn.Parameter):
                wanted.add(id(each))
            else:
                raise failed(
                    self._trial, NAME, each, expected, fix, did=f"returned {described(each)} in a list"
                )
        for engine in self._engines:
            engine.freeze(wanted)
            wanted = wanted - engine.own
        if wanted:
            did = "returned parameters that no engine has"
            fix = "return modules or parameters of self.engine.module"
            raise failed(self._trial, NAME, None, "parameters of the trained models", fix, did=did)

    def end(self) -> None:
        """After a step: all is as it was built, so a checkpoint is, too; refuse what was changed by hand."""
        for engine in self._engines:
            engine.thaw()
            engine.look()


class _Engine:
    """One engine: its parameters, and the groups that its optimizer steps over."""

    def __init__(self, trial: Any, engine: Any) -> None:
        self._trial = trial
        self._engine = engine
        self._parameters = list(engine.module.parameters())
        self._built = [parameter.requires_grad for parameter in self._parameters]
        self._at_step: list[bool] | None = None  # where they were changed by hand when the optimizer stepped
        self.own = {id(parameter) for parameter in self._parameters}
        optimizer = getattr(engine, "basic_optimizer", getattr(engine, "optimizer", None))
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._is_plain = self._optimizer is getattr(engine, "optimizer", None)
        self._frozen: list[dict[str, Any]] = []  # groups of the optimizer
        self._wanted: set[int] = set()
        self._out: list[tuple[dict[str, Any], Any]] = []
        if self._optimizer is not None:
            self._optimizer.register_step_pre_hook(self._before_step)
            self._optimizer.register_step_post_hook(self._after_step)

    def freeze(self, wanted: set[int]) -> None:
        """Keep the groups with these parameters out of the next step.

        Raises:
            ConfigError: it is an engine that cannot do without some gradients.
        """
        self._frozen, self._wanted = [], wanted & self.own
        if not self._wanted:
            return
        of_all = getattr(self._trial, "_groups", ())
        groups: list[set[int]] = next((groups for engine, groups in of_all if engine is self._engine), [])
        optimizer, is_pipeline = self._optimizer, isinstance(self._engine, PipelineEngine)
        if is_pipeline or engine_name(self._engine) == DDP:
            kind = "a pipeline" if is_pipeline else "torch's DistributedDataParallel"
            message = f"{kind} waits for the gradients of all parameters"
            fix = "give their group a rate of 0 in build_scheduler: LambdaLR(optimizer, [a function for each group])"
        elif optimizer is None or len(optimizer.param_groups) != len(groups):
            message = "the optimizer's groups are not those of build_parameters"
            fix = "return every group with at least one parameter that requires a gradient"
        else:
            message = fix = ""
        if message or optimizer is None:
            key = method_of(self._trial, NAME)
            raise ConfigError(Problem(key=key, message=message, fix=fix, code=NAME))
        for index, group in enumerate(groups):
            if not group & wanted:
                continue
            self._frozen.append(optimizer.param_groups[index])
            if rest := len(group - wanted):
                did = f"freezes a part of group {index} of the parameters, and {rest} of it would still train"
                raise failed(self._trial, NAME, None, "whole groups", GROUP_FIX, did=did)
        for parameter, built in zip(self._parameters, self._built, strict=True):
            if built and id(parameter) in wanted:
                parameter.requires_grad_(False)

    def thaw(self) -> None:
        if self._frozen:
            for parameter, built in zip(self._parameters, self._built, strict=True):
                parameter.requires_grad_(built)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        """Leave out the frozen groups; ZeRO steps group by group, or part by part, the others out of sight."""
        for group in optimizer.param_groups:
            if any(group is each for each in self._frozen):
                self._out.append((group, group["params"]))
                group["params"] = []
        if self._at_step is None:
            self._at_step = list(
                map(REQUIRES_GRAD, self._parameters)
            )  # each step, of thousands of parameters
            if self._wanted:
                self._at_step = [
                    is_on or (built and id(parameter) in self._wanted)
                    for is_on, parameter, built in zip(
                        self._at_step, self._parameters, self._built, strict=True
                    )
                ]

    def _after_step(self, *_: Any) -> None:
        for group, parameters in self._out:
            group["params"] = parameters
        self._out.clear()

    def look(self) -> None:
        """Refuse a parameter that was frozen or unfrozen by hand in this step, where the engine does not follow."""
        now, self._at_step = self._at_step, None
        if now is None or now == self._built:
            return
        stepped: set[int] = set()
        if self._is_plain and self._optimizer is not None:
            stepped = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        names = [name for name, _ in self._engine.module.named_parameters()]
        for name, parameter, built, is_on in zip(names, self._parameters, self._built, now, strict=True):
            if is_on == built or id(parameter) in stepped:
                continue
            what = "unfrozen in training, and would not be trained: the engine was made without it"
            if built:
                what = "frozen in training, and would still move by its momentum and weight decay"
            raise TrainingError(
                f"{name} was {what}\n"
                "  fix: let it require a gradient in build_model, name it in a group of its own in build_parameters, "
                "and freeze it by the trial's method frozen(batch_idx)"
            )
        self._built = now
