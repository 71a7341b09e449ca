"""Parameters that are not trained for some steps (``frozen``), exactly and under every ZeRO stage.

A parameter whose ``requires_grad`` is turned off in training still moves under ZeRO 1 to 3, by the momentum and the
weight decay of the flat partition that it is in (measured, AdamW, deepspeed 0.19.8). One that was off when the engine
was made never trains under ZeRO 3, and fails under ZeRO 1 and 2. So a whole group of parameters is kept out of the
optimizer's step, and no gradient is computed for it; outside of the step all is as it was built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from determined import util

from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.trial.author import described, failed, method_of
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.ddp import DDP, engine_name

NAME = "frozen"
GROUP_FIX = "make them a group of their own in build_parameters: [{'params': [...]}, {'params': [...]}]"


class Freezing:
    """Freezes what the trial's ``frozen`` names, step by step.

    Args:
        trial: The trial.
        engines: Its engines.
    """

    def __init__(self, trial: Any, engines: list[Any]) -> None:
        self._trial = trial
        self._engines = [_Engine(trial, engine) for engine in engines]
        is_ours = isinstance(trial, ReconciledTrial)
        self._is_used = is_ours and util.is_overridden(trial.frozen, ReconciledTrial)

    def begin(self, batch_idx: int) -> None:
        """Before a step: compute no gradients for what is frozen in it."""
        if not self._is_used:
            return
        wanted = self._wanted(self._trial.frozen(batch_idx))
        for engine in self._engines:
            engine.freeze(wanted)
            wanted = wanted - engine.own
        if wanted:
            did = "returned parameters that no engine has"
            fix = "return modules or parameters of self.engine.module"
            raise failed(self._trial, NAME, None, "parameters of the trained models", fix, did=did)

    def _wanted(self, value: Any) -> set[int]:
        fix = "return modules or parameters: [self.engine.module.encoder]; [] freezes nothing"
        expected = "a list of modules and parameters"
        if isinstance(value, (torch.nn.Module, torch.Tensor, str)) or not isinstance(value, Iterable):
            raise failed(self._trial, NAME, value, expected, fix)
        found: set[int] = set()
        for each in value:
            if isinstance(each, torch.nn.Module):
                found |= {id(parameter) for parameter in each.parameters()}
            elif isinstance(each, torch.nn.Parameter):
                found.add(id(each))
            else:
                did = f"returned {described(each)} in a list"
                raise failed(self._trial, NAME, each, expected, fix, did=did)
        return found

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

    @property
    def _groups(self) -> list[set[int]]:
        found = [groups for engine, groups in getattr(self._trial, "_groups", ()) if engine is self._engine]
        return found[0] if found else []

    # ------------------------------------------------------------------------------------ by the trial

    def freeze(self, wanted: set[int]) -> None:
        """Keep the groups with these parameters out of the next step."""
        self._frozen, self._wanted = [], wanted & self.own
        if not self._wanted:
            return
        groups = self._groups
        optimizer = self._follows(groups)
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

    def _follows(self, groups: list[set[int]]) -> torch.optim.Optimizer:
        """The optimizer, of an engine that can do without some gradients.

        Raises:
            ConfigError: it cannot.
        """
        is_pipeline = isinstance(self._engine, PipelineEngine)
        key = method_of(self._trial, NAME)
        if is_pipeline or engine_name(self._engine) == DDP:
            kind = "a pipeline" if is_pipeline else "torch's DistributedDataParallel"
            message = f"{kind} waits for the gradients of all parameters"
            fix = "give their group a rate of 0 in build_scheduler: LambdaLR(optimizer, [a function for each group])"
        elif self._optimizer is None or len(self._optimizer.param_groups) != len(groups):
            message = "the optimizer's groups are not those of build_parameters"
            fix = "return every group with at least one parameter that requires a gradient"
        else:
            return self._optimizer
        raise ConfigError(Problem(key=key, message=message, fix=fix, code=NAME))

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
            self._at_step = [
                parameter.requires_grad or (built and id(parameter) in self._wanted)
                for parameter, built in zip(self._parameters, self._built, strict=True)
            ]

    def _after_step(self, *_: Any) -> None:
        for group, parameters in self._out:
            group["params"] = parameters
        self._out.clear()

    # ------------------------------------------------------------------------------------ by hand

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
            if built:
                what = "frozen in training, and would still move by its momentum and weight decay"
            else:
                what = "unfrozen in training, and would not be trained: the engine was made without it"
            raise TrainingError(
                f"{name} was {what}\n"
                "  fix: let it require a gradient in build_model, name it in a group of its own in build_parameters, "
                "and freeze it by the trial's method frozen(batch_idx)"
            )
        self._built = now
