"""The learning-rate schedule of an engine: that of ``build_scheduler``, or that of the DeepSpeed JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from determined_ds.config.fill import PEAKS
from determined_ds.errors import ConfigError, Problem, TrialError
from determined_ds.trial.author import described, is_of_library, method_of, wrong

logger = logging.getLogger("determined_ds")

NAME = "build_scheduler"
NO_SCHEDULER = "--set hyperparameters.overwrite_deepspeed_args.scheduler=null"


class PlateauSchedule:
    """``ReduceLROnPlateau`` as an engine takes it: its step does nothing, each validation drives it.

    DeepSpeed would call its ``step`` with the batch size as the metric. A resumed run has the settings of its code and
    the position of the checkpoint.

    Source: ``DeepSpeedEngine._take_model_step`` in deepspeed 0.19.8's ``runtime/engine.py``.

    Args:
        plateau: Torch's schedule.
    """

    POSITION = ("best", "cooldown_counter", "num_bad_epochs", "last_epoch", "_last_lr")
    __slots__ = ("plateau",)  # no __dict__, so no settings that a checkpoint would record

    def __init__(self, plateau: ReduceLROnPlateau) -> None:
        self.plateau = plateau

    @property
    def optimizer(self) -> Any:
        return self.plateau.optimizer

    def step(self) -> None:
        """After an optimizer step the rate stays."""

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.plateau, name) for name in self.POSITION if hasattr(self.plateau, name)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self.plateau, name, value)


def give_schedule(trial: Any, engine: Any, ds_config: dict[str, Any]) -> None:
    """Give an engine that was made of ``ds_config`` the schedule of ``build_scheduler``, where it returns one."""
    optimizer = getattr(engine, "basic_optimizer", engine.optimizer)
    if optimizer is None:
        return
    value, did, fix = trial.build_scheduler(optimizer), "", ""
    kind = (ds_config.get("scheduler") or {}).get("type")
    if value is None:
        if kind is not None or is_of_library(trial.build_scheduler):
            return
        fix = "return the schedule; for a rate that does not change, ConstantLR(optimizer, 1.0)"
    elif isinstance(value, type) or not all(
        callable(getattr(value, each, None)) for each in ("step", "state_dict", "load_state_dict")
    ):
        fix = "return e.g. OneCycleLR(optimizer, max_lr=..., total_steps=self.total_steps)"
    elif getattr(value, "optimizer", optimizer) is not optimizer:
        did = f"returned {described(value)} of another optimizer, so it would change nothing"
        fix = f"build it from the argument: return {type(value).__name__}(optimizer, ...)"
    if fix:
        expected = "a schedule of torch.optim.lr_scheduler for the given optimizer"
        raise TrialError(wrong(trial, NAME, value, expected, fix, did=did))
    if kind is not None:
        message = f"the JSON's schedule would not be used: {method_of(trial, NAME)} returns another"
        fix = f"remove it from the JSON, or {NO_SCHEDULER}; or remove {NAME}"
        problem = Problem(key="scheduler.type", value=kind, message=message, fix=fix, code="two-schedulers")
        raise ConfigError(problem)
    if isinstance(value, ReduceLROnPlateau):
        _check_metric(trial, value)
        value = PlateauSchedule(value)
    engine.lr_scheduler = value


def _check_metric(trial: Any, plateau: ReduceLROnPlateau) -> None:
    """A plateau is of ``searcher.metric``, in the direction of the searcher."""
    try:
        searcher = trial.context.get_experiment_config().get("searcher") or {}
    except ValueError:  # Determined's: no experiment configuration was given
        searcher = {}
    smaller = searcher.get("smaller_is_better") is not False
    if not searcher.get("metric"):
        key, value = "searcher.metric", None
        message = "is missing: ReduceLROnPlateau goes by it, at each validation"
        fix = "name the metric, e.g. searcher: {name: single, metric: validation_loss}"
    elif (plateau.mode == "min") != smaller:
        key, value = NAME, plateau.mode
        message = f"the mode of ReduceLROnPlateau contradicts searcher.smaller_is_better, which is {smaller}"
        fix = f"write mode={'min' if smaller else 'max'!r}, or change searcher.smaller_is_better"
    else:
        return
    raise ConfigError(Problem(key=key, value=value, message=message, fix=fix, code="plateau"))


def check_rates(trial: Any, optimizer: Any, parameters: Any, ds_config: dict[str, Any]) -> None:
    """Refuse a schedule of the JSON that gives one rate to groups which the author gave rates of their own.

    Source: ``update_lr`` and ``_format_param`` in deepspeed 0.19.8's ``runtime/lr_schedules.py``.
    """
    section = ds_config.get("scheduler") or {}
    kind = str(section.get("type"))
    peak = (section.get("params") or {}).get(PEAKS.get(kind, ""))
    groups = optimizer.param_groups if optimizer is not None else parameters or ()
    own = {float(group["lr"]): "" for group in groups if isinstance(group, Mapping) and "lr" in group}
    if not isinstance(peak, (int, float)) or set(own) <= {peak}:
        return
    method = method_of(trial, "build_parameters" if optimizer is None else "build_optimizer")
    rates = ", ".join(f"{rate:g}" for rate in own)
    if len(own) == 1 and optimizer is not None:
        logger.warning("warning: %s sets the learning rate, up to %g, not %s (%s)", kind, peak, method, rates)
        return
    message = f"{kind} sets the rate of all groups, up to {peak:g}; {method} gives them {rates}"
    fix = f"write a list there, a rate for each group; or return a schedule from {NAME}, with {NO_SCHEDULER}"
    key = f"scheduler.params.{PEAKS[kind]}"
    raise ConfigError(Problem(key=key, value=peak, message=message, fix=fix, code="group-rates"))


def drive_by_validation(engines: list[Any], value: float | None) -> None:
    """Inform the schedules that go by validations.

    Args:
        engines: Of the trial.
        value: Of ``searcher.metric``; None where it was not reported as a number.
    """
    for engine in engines:
        schedule = getattr(engine, "lr_scheduler", None)
        if isinstance(schedule, PlateauSchedule) and value is not None:
            schedule.plateau.step(value)
