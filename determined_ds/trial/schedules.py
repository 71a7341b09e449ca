"""The learning-rate schedule of an engine: that of ``build_scheduler``, or that of the DeepSpeed JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from determined_ds.config.fill import PEAKS
from determined_ds.errors import TrialError
from determined_ds.trial.author import is_of_library, method_of, refused, wrong

logger = logging.getLogger("determined_ds")

NAME = "build_scheduler"
NO_SCHEDULER = "--set hyperparameters.overwrite_deepspeed_args.scheduler=null"


def give_schedule(trial: Any, engine: Any, ds_config: dict[str, Any]) -> None:
    """Give an engine that was made of ``ds_config`` the schedule of ``build_scheduler``, where it returns one."""
    optimizer = getattr(engine, "basic_optimizer", engine.optimizer)
    if optimizer is None:
        return
    value, kind = trial.build_scheduler(optimizer), (ds_config.get("scheduler") or {}).get("type")
    if isinstance(value, ReduceLROnPlateau) or isinstance(engine.lr_scheduler, ReduceLROnPlateau):
        # Its step would be given the batch size: ``DeepSpeedEngine._take_model_step`` in deepspeed 0.19.8.
        key = "scheduler.type" if value is None else method_of(trial, NAME)
        message = "ReduceLROnPlateau steps by a metric of a validation; a schedule here steps at each optimizer step"
        fix = "take e.g. OneCycleLR(optimizer, max_lr=..., total_steps=self.total_steps)"
        raise refused(key, message, fix, "plateau")
    if value is None and (kind is not None or is_of_library(trial.build_scheduler)):
        return
    is_schedule = callable(getattr(value, "step", None)) and not isinstance(value, type)
    if not is_schedule or getattr(value, "optimizer", optimizer) is not optimizer:
        expected = "a schedule of torch.optim.lr_scheduler for the optimizer that it is given"
        fix = "return e.g. OneCycleLR(optimizer, max_lr=..., total_steps=self.total_steps)"
        raise TrialError(wrong(trial, NAME, value, expected, fix))
    if kind is not None:
        message = f"the JSON's schedule would not be used: {method_of(trial, NAME)} returns another"
        fix = f"remove it from the JSON, or {NO_SCHEDULER}; or remove {NAME}"
        raise refused("scheduler.type", message, fix, "two-schedulers", value=kind)
    engine.lr_scheduler = value


def check_rates(trial: Any, optimizer: Any, parameters: Any, ds_config: dict[str, Any]) -> None:
    """Warn of a schedule of the JSON that sets the rate of groups which the author gave rates of their own.

    Source: ``update_lr`` and ``_format_param`` in deepspeed 0.19.8's ``runtime/lr_schedules.py``.
    """
    section = ds_config.get("scheduler") or {}
    kind = str(section.get("type"))
    peak = (section.get("params") or {}).get(PEAKS.get(kind, ""))
    groups = optimizer.param_groups if optimizer is not None else parameters or ()
    own = {float(group["lr"]) for group in groups if isinstance(group, Mapping) and "lr" in group}
    if isinstance(peak, (int, float)) and not own <= {peak}:
        logger.warning(
            "warning: %s sets the rate of all groups, up to %g, not those of %s (%s); write a list of rates there, or "
            "return a schedule from %s, with %s",
            *(kind, peak, method_of(trial, "build_parameters" if optimizer is None else "build_optimizer")),
            *(", ".join(f"{rate:g}" for rate in sorted(own)), NAME, NO_SCHEDULER),
        )
