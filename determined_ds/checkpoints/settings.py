"""An engine's state besides its tensors: settings of the optimizer's groups, its schedule, loss scale and counts.

A checkpoint restores the settings of the optimizer and of torch's schedulers with their state. It also holds a record
of what both were built with, so a setting that has changed since then takes effect, and one that the trial changed
during training is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from determined_ds.checkpoints.engine_slices import EngineSlices
from determined_ds.errors import ConfigError, Problem
from determined_ds.train.memory import base_optimizer

Record = dict[str, Any]
# Attributes of a scheduler that are its position, not its settings.
POSITION = ("last_epoch", "last_batch_iteration", "_last_lr", "_step_count")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Of DeepSpeed's loss scalers, what changes during training.
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ABSENT = object()


def records_of(engines: Sequence[Any]) -> list[Record]:
    """What each engine was built with; call it before anything is loaded or trained."""
    found = []
    for engine in engines:
        optimizer, scheduler = (getattr(engine, name, None) for name in ("optimizer", "lr_scheduler"))
        record = {
            "groups": list(getattr(optimizer, "param_groups", None) or []),
            "clip_grad": getattr(optimizer, "clip_grad", None),
            "scheduler": getattr(scheduler, "__dict__", {}),
        }
        found.append({"clip_grad": None, **_plain(record)})
    return found


def _plain(value: Any) -> Any:
    """A value that a checkpoint can hold as it is, without what it cannot hold; parameters are not settings."""
    if hasattr(value, "last_epoch"):  # a scheduler inside another one
        value = vars(value)
    if isinstance(value, Mapping):
        items = {key: _plain(item) for key, item in value.items() if key != "params"}
        return {key: item for key, item in items.items() if item is not _ABSENT}
    if isinstance(value, (list, tuple)):
        values = [_plain(item) for item in value]
        return _ABSENT if any(item is _ABSENT for item in values) else values
    return value if isinstance(value, (bool, int, float, str, type(None))) else _ABSENT


# ------------------------------------------------------------------------------------------- written and put back


def settings_of(own: EngineSlices, built: Record) -> dict[str, Any]:
    """What a checkpoint holds of an engine besides its tensors; ``built`` is its record, see :func:`records_of`."""
    engine = own.engine
    groups = [] if engine.optimizer is None else base_optimizer(engine).param_groups
    scheduler, scaler = getattr(engine, "lr_scheduler", None), _loss_scaler(engine)
    return {
        "groups": [
            {
                "names": _names_in_group(own, number),
                "settings": {key: value for key, value in group.items() if key != "params"},
                "built": was,
            }
            for number, (group, was) in enumerate(zip(groups, built["groups"], strict=True))
        ],
        "built": {key: built[key] for key in ("clip_grad", "scheduler")},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scale": {key: getattr(scaler, key) for key in SCALE if hasattr(scaler, key)},
        "counters": {name: getattr(engine, name) for name in COUNTERS if hasattr(engine, name)},
    }


def put_settings(own: EngineSlices, stored: Mapping[str, Any], now: Record) -> Record:
    """Give an engine what :func:`settings_of` returned.

    Returns what the engine in the checkpoint was built with, its groups in the order of this engine's.
    """
    engine, then = own.engine, dict(stored["built"], groups=[])
    for number, group in enumerate(now["groups"]):
        # The group with the same parameters; where none is known, the one of the same number.
        names, groups = set(_names_in_group(own, number)), stored["groups"]
        alike = [each for each in groups if names & set(each["names"])] + groups[number : number + 1]
        found = alike[0] if alike else {"settings": {}, "built": group}
        then["groups"].append(found["built"])
        if own.held:
            base_optimizer(engine).param_groups[number].update(found["settings"])
    if getattr(engine, "lr_scheduler", None) is not None and stored["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(stored["lr_scheduler"])
    for owner, values in ((engine, stored["counters"]), (_loss_scaler(engine), stored["loss_scale"])):
        for name, value in values.items():
            if hasattr(owner, name):
                setattr(owner, name, value)
    if not isinstance(engine, PipelineEngine):  # a checkpoint is between steps
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    return then


def _names_in_group(own: EngineSlices, number: int) -> list[str]:
    """The parameters in a group of the optimizer, of those that this rank holds a part of."""
    return [own.name_of(lies.parameter) for held in own.held if held.group == number for lies in held.lies]


def _loss_scaler(engine: Any) -> Any:
    """What keeps DeepSpeed's loss scale; None where there is none."""
    config = getattr(engine.optimizer, "loss_scale_config", None)
    if config is not None:
        return config if getattr(config, "use_grad_scaling", True) else None
    return getattr(engine.optimizer, "loss_scaler", None)


# ------------------------------------------------------------------------------------------- what changed since


def put_into_effect(engine: Any, then: Record, now: Record) -> str:
    """Apply settings that have changed since a loaded checkpoint was written, from what it was built with then and now.

    Returns a line about a schedule that goes on in another way, or "".
    """
    if then == now or engine.optimizer is None:
        return ""
    optimizer, scheduler = engine.optimizer, getattr(engine, "lr_scheduler", None)
    if then["clip_grad"] != now["clip_grad"]:
        optimizer.clip_grad = now["clip_grad"]
    for group, old, new in zip(optimizer.param_groups, then["groups"], now["groups"], strict=True):
        for key, value in _changed(old, new).items():
            if key != "lr" or scheduler is None:
                group[key] = _as_it_is(value, group.get(key))
    if scheduler is None or (then["groups"], then["scheduler"]) == (now["groups"], now["scheduler"]):
        return ""
    rates = [group["lr"] for group in optimizer.param_groups]
    _reschedule(scheduler, _changed(then["scheduler"], now["scheduler"]), now["groups"])
    pairs = zip(rates, (group["lr"] for group in optimizer.param_groups), strict=True)
    moved = dict.fromkeys(f"{was:.6g} -> {rate:.6g}" for was, rate in pairs if was != rate)
    return f"{type(scheduler).__name__} goes on by its new settings: lr {', '.join(moved)}" if moved else ""


def _changed(then: Record, now: Record) -> Record:
    """The settings that are others now, or new."""
    return {key: value for key, value in now.items() if then.get(key, _ABSENT) != value}


def _reschedule(scheduler: Any, changed: Record, groups: Sequence[Record]) -> None:
    """Give a loaded scheduler its changed settings, and set the rates of its current step by them.

    Source: DeepSpeed's schedulers (0.19.8, ``runtime/lr_schedules.py``) keep only their position in a checkpoint;
    torch's keep all their attributes (``LRScheduler.state_dict``).
    """
    if hasattr(scheduler, "last_batch_iteration"):
        if scheduler.last_batch_iteration >= 0:
            scheduler.step(scheduler.last_batch_iteration)
            return
        rates = [group["lr"] for group in groups]
    else:
        changed = {key: value for key, value in changed.items() if key not in POSITION}
        for key, value in changed.items():
            setattr(scheduler, key, _as_it_is(value, getattr(scheduler, key, None)))
        if hasattr(scheduler, "_get_closed_form_lr"):
            rates = scheduler._get_closed_form_lr()
        elif hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs"):
            pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            rates = [base * rate(scheduler.last_epoch) for base, rate in pairs]
        # Source: get_lr of both in torch 2.13.0 reads last_epoch, the settings and no rate of a group.
        elif isinstance(scheduler, (OneCycleLR, CyclicLR)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it is not called within a step
                rates = [float(rate) for rate in scheduler.get_lr()]
        else:
            message = (
                "computes each rate from the one before: its settings, and the learning rate, must stay what they "
                f"were (these differ: {', '.join(sorted(changed)) or 'those of the optimizer'})"
            )
            fix = "restore the old settings, or start a new run from the weights: "
            fix += "--set searcher.source_checkpoint_uuid=CHECKPOINT"
            kind = type(scheduler).__name__
            raise ConfigError(
                Problem(key="scheduler", value=kind, message=message, fix=fix, code="resume-changed")
            )
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _as_it_is(value: Any, current: Any) -> Any:
    """A recorded value in the type that its owner has: a tuple of betas, a ``Counter`` of milestones."""
    return type(current)(value) if isinstance(current, (tuple, dict)) else value
