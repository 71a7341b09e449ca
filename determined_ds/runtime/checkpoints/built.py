"""What an engine was built with: whether a checkpoint fits it, and what has changed since that was written.

A checkpoint brings back the settings of the optimizer and of torch's schedulers with their state. The record of what
both were built with travels in it, so that a setting which was changed since then takes effect, and one that a trial
has changed while it trained is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from determined_ds.errors import ConfigError, Problem

Record = dict[str, Any]
MOST_NAMED = 3
# Of a scheduler: where it stands, and not how it was made.
POSITION = ("last_epoch", "last_batch_iteration", "_last_lr", "_step_count")
SETTINGS = ("lr", "weight_decay", "betas", "eps", "momentum")
_ABSENT = object()


def records_of(engines: Sequence[Any]) -> list[Record]:
    """What each engine was built with; to be asked before anything is loaded or trained."""
    return [_record_of(engine) for engine in engines]


def _record_of(engine: Any) -> Record:
    optimizer = getattr(engine, "optimizer", None)
    groups = getattr(optimizer, "param_groups", None) or []
    return {
        "parameters": {name: _described(parameter) for name, parameter in engine.module.named_parameters()},
        "groups": [_plain_items(group) for group in groups],
        "clip_grad": _plain(getattr(optimizer, "clip_grad", None), None),
        "scheduler": _plain_items(getattr(getattr(engine, "lr_scheduler", None), "__dict__", {})),
    }


def _described(parameter: Any) -> str:
    """Its shape, whole where ZeRO 3 has split it, and whether it is trained."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return f"{shape}" if parameter.requires_grad else f"{shape}, frozen"


def _plain_items(items: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _plain(value, _ABSENT) for key, value in items.items() if key != "params"}
    return {key: value for key, value in found.items() if value is not _ABSENT}


def _plain(value: Any, otherwise: Any) -> Any:
    """A value that a checkpoint can hold as it is."""
    if hasattr(value, "last_epoch"):  # a scheduler that another one is made of
        return _plain_items(vars(value))
    if isinstance(value, Mapping):
        return _plain_items(value)
    if isinstance(value, (list, tuple)):
        items = [_plain(item, _ABSENT) for item in value]
        return otherwise if any(item is _ABSENT for item in items) else items
    return value if isinstance(value, (bool, int, float, str, type(None))) else otherwise


# ------------------------------------------------------------------------------------------------ does it fit


def misfit(then: Sequence[Record], now: Sequence[Record]) -> str | None:
    """Why what was built then cannot be loaded into what is built now; None where it can."""
    if len(then) != len(now):
        return f"it holds {len(then)} engines, and this trial has {len(now)}"
    for number, (before, wanted) in enumerate(zip(then, now, strict=True)):
        reasons = _misfits(before["parameters"], wanted["parameters"])
        if len(before["groups"]) != len(wanted["groups"]):
            counts = f"{len(before['groups'])}, and this one has {len(wanted['groups'])}"
            reasons = [*reasons, f"its optimizer had {counts} groups of parameters"]
        if reasons:
            return (f"engine {number}: " if len(now) > 1 else "") + "; ".join(_most(reasons))
    return None


def differing_parameters(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between the parameters of a checkpoint and those of a model, a few of them named.

    Args:
        then: Name -> shape, in words, of the checkpoint.
        now: The same of the model.
    """
    return _most(_misfits(then, now))


def _most(reasons: list[str]) -> list[str]:
    more = [f"and {len(reasons) - MOST_NAMED} more"] if len(reasons) > MOST_NAMED else []
    return [*reasons[:MOST_NAMED], *more]


def _misfits(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    other = [
        f"{name} has shape {then[name]} in it, and {now[name]} in this model"
        for name in now
        if name in then and then[name] != now[name]
    ]
    missing = [f"it has no {name} {shape}" for name, shape in now.items() if name not in then]
    surplus = [f"{name} {shape} is not in this model" for name, shape in then.items() if name not in now]
    return [*other, *missing, *surplus]


# ------------------------------------------------------------------------------------------------ what changed


def put_into_effect(engines: Sequence[Any], then: Sequence[Record], now: Sequence[Record]) -> None:
    """Have settings that have changed since a checkpoint was written take effect, once it is loaded.

    Args:
        engines: The engines, loaded.
        then: What they were built with when it was written.
        now: What they are built with now.

    Raises:
        ConfigError: a scheduler computes each rate from the one before, so that its settings cannot change.
    """
    for engine, before, wanted in zip(engines, then, now, strict=True):
        changed = {key for key in ("groups", "clip_grad", "scheduler") if before[key] != wanted[key]}
        if not changed:
            continue
        optimizer, scheduler = engine.optimizer, getattr(engine, "lr_scheduler", None)
        if "clip_grad" in changed:
            optimizer.clip_grad = wanted["clip_grad"]
        for group, old, new in zip(optimizer.param_groups, before["groups"], wanted["groups"], strict=True):
            keys = {key for key, value in new.items() if old.get(key, _ABSENT) != value}
            group.update(
                {key: _as_it_is(new[key], group.get(key)) for key in keys if key != "lr" or scheduler is None}
            )
        if scheduler is not None and changed & {"groups", "scheduler"}:
            _reschedule(scheduler, before["scheduler"], wanted["scheduler"], wanted["groups"])


def settings_kept(engines: Sequence[Any], now: Sequence[Record]) -> str:
    """What differs from what was asked for after loading a checkpoint that has no record; "" where nothing does.

    Args:
        engines: The engines, loaded; one with a scheduler has the rate that this says.
        now: What they are built with.
    """
    kept = []
    for engine, wanted in zip(engines, now, strict=True):
        scheduled = getattr(engine, "lr_scheduler", None) is not None
        names = [name for name in SETTINGS if name != "lr" or not scheduled]
        for group, asked in zip(
            getattr(engine.optimizer, "param_groups", ()), wanted["groups"], strict=False
        ):
            kept += [
                f"{name} {group[name]}, not {asked[name]}"
                for name in names
                if name in group and name in asked and _plain(group[name], None) != asked[name]
            ]
    return ", ".join(dict.fromkeys(kept))


def _reschedule(scheduler: Any, before: Record, wanted: Record, groups: Sequence[Record]) -> None:
    """Have a scheduler that stands at a step give the rates of that step by its new settings.

    Source: DeepSpeed's schedulers (0.19.8, ``runtime/lr_schedules.py``) keep their position alone in a checkpoint;
    torch's keep all their attributes (``LRScheduler.state_dict``).
    """
    if hasattr(scheduler, "last_batch_iteration"):
        if scheduler.last_batch_iteration >= 0:
            scheduler.step(scheduler.last_batch_iteration)
        else:
            _set_rates(scheduler, [group["lr"] for group in groups])
        return
    changed = {
        key: _as_it_is(value, getattr(scheduler, key, None))
        for key, value in wanted.items()
        if key not in POSITION and before.get(key, _ABSENT) != value
    }
    vars(scheduler).update(changed)
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    if closed is None and hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs"):

        def closed() -> list[float]:
            pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            return [base * rate(scheduler.last_epoch) for base, rate in pairs]

    if closed is None:
        raise ConfigError(
            Problem(
                key="scheduler",
                value=type(scheduler).__name__,
                message="computes each rate from the one before: its settings, and the learning rate, must stay what "
                f"they were (these differ: {', '.join(sorted(changed)) or 'those of the optimizer'})",
                fix="go back to what they were, or start anew",
                code="resume-changed",
            )
        )
    _set_rates(scheduler, closed())


def _as_it_is(value: Any, current: Any) -> Any:
    """A value of a record in the type that its owner holds it in: a tuple of betas, a ``Counter`` of milestones."""
    return type(current)(value) if isinstance(current, (tuple, dict)) else value


def _set_rates(scheduler: Any, rates: Sequence[float]) -> None:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)
