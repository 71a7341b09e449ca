"""``fit.breakdown`` of transformers' Trainer: the parts of its steps, read from the engine that accelerate has made."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from determined import core

from determined_ds.config.deepspeed.instruments import INSTRUMENTS
from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.profiling.breakdown import Breakdown, part_metrics
from determined_ds.runtime.profiling.peak_flops import known_peak_flops
from determined_ds.trial.comms_logger import correct_comms_logger
from determined_ds.trial.step_timers import correct_timers


class TrainerBreakdown:
    """What :class:`DetCallback` does where a step is taken apart.

    Args:
        core_context: Of the script.
        args: The arguments of the Trainer.
        engine: Accelerate's.
    """

    def __init__(self, core_context: core.Context, args: Any, engine: Any) -> None:
        self._distributed = core_context.distributed
        self._samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        resolved = getattr(args, "resolved", None)
        correct_timers(engine)
        precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
        peak = known_peak_flops(torch.device(args.device), precision, self._distributed.local_size)
        self._distributed.allgather(None)  # who is late would have the others wait in their first step
        self._parts = Breakdown(
            [engine],
            device=torch.device(args.device),
            switched_on=frozenset(INSTRUMENTS) if resolved is None else resolved.switched_on,
            peak_flops=peak,
            counts_flops=not args.torch_compile,
        )
        self._steps = 0
        self._rows: list[list[float]] = []

    def begin_step(self) -> None:
        """The micro-batches of a step are there."""
        self._parts.begin_batch()

    def end_step(self, *, is_reported: bool) -> None:
        """A step has ended; a collective where it is reported."""
        self._parts.end_batch()
        self._steps += 1
        if is_reported:
            self._rows = self._distributed.allgather(self._parts.take(self._steps))
            self._steps = 0

    def metrics(self, samples_per_second: float | None) -> dict[str, float]:
        """Of the steps until the last that was reported."""
        if not self._rows:
            return {}
        columns = [list(column) for column in zip(*self._rows, strict=True)]
        return part_metrics(columns, samples_per_second, self._samples)

    def close(self) -> None:
        """Training is over."""
        self._parts.close()


def trainer_breakdown(core_context: core.Context, args: Any, model: Any) -> TrainerBreakdown:
    """What takes the steps of a Trainer apart; a collective.

    Args:
        core_context: Of the script.
        args: The arguments of the Trainer.
        model: The model, without its engine.

    Raises:
        ConfigError: DeepSpeed does not train it.
    """
    engine = engine_of(model)
    if engine is None:
        message = "reads DeepSpeed's instruments, and this Trainer trains without DeepSpeed"
        fix = "give TrainingArguments a deepspeed configuration, or leave breakdown out"
        key = "hyperparameters.fit.breakdown"
        raise ConfigError(Problem(key=key, value=True, message=message, fix=fix, code="hf-breakdown"))
    return TrainerBreakdown(core_context, args, engine)


def engine_of(model: Any) -> Any:
    """The engine whose hooks a model has, since callbacks are not given it; None without one.

    Source: ``DeepSpeedEngine._create_module_forward_pre_hook`` in deepspeed 0.19.8's ``runtime/engine.py``.
    """
    for hook in model._forward_pre_hooks.values():
        if inspect.isfunction(hook):
            found = inspect.getclosurevars(hook).nonlocals.get("self")
            if isinstance(found, DeepSpeedEngine):
                return found
    return None


def correct_instruments(args: Any) -> None:
    """Have the JSON's ``comms_logger`` log what each call has taken, where DeepSpeed trains."""
    if getattr(args, "hf_deepspeed_config", None) is not None:
        correct_comms_logger()
