"""What an engine was built with: whether a checkpoint fits it, and which settings have changed since it was written.

A checkpoint restores the settings of the optimizer and of torch's schedulers with their state. It also holds a record
of what both were built with, so a setting that has changed since then takes effect, and one that the trial changed
during training is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.checkpoints.cut_tensors import whole_shape

Record = dict[str, Any]
MOST_NAMED = 3
# Attributes of a scheduler that are its position, not its settings.
POSITION = ("last_epoch", "last_batch_iteration", "_last_lr", "_step_count")
SETTINGS = ("lr", "weight_decay", "betas", "eps", "momentum")
_ABSENT = object()


def records_of(engines: Sequence[Any]) -> list[Record]:
    """What each engine was built with; call it before anything is loaded or trained."""
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
    """The shape of the whole, and whether it is trained."""
    shape = whole_shape(parameter)
    return f"{shape}" if parameter.requires_grad else f"{shape}, frozen"


def _plain_items(items: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _plain(value, _ABSENT) for key, value in items.items() if key != "params"}
    return {key: value for key, value in found.items() if value is not _ABSENT}


def _plain(value: Any, otherwise: Any) -> Any:
    """A value that a checkpoint can hold as it is."""
    if hasattr(value, "last_epoch"):  # a scheduler inside another one
        return _plain_items(vars(value))
    if isinstance(value, Mapping):
        return _plain_items(value)
    if isinstance(value, (list, tuple)):
        items = [_plain(item, _ABSENT) for item in value]
        return otherwise if any(item is _ABSENT for item in items) else items
    return value if isinstance(value, (bool, int, float, str, type(None))) else otherwise


# ------------------------------------------------------------------------------------------------ does it fit


def misfit(then: Sequence[Record], now: Sequence[Record]) -> str | None:
    """Why the state of engines built then does not fit those built now; None where it does."""
    if len(then) != len(now):
        return f"it holds {len(then)} engine{'s' * (len(then) != 1)}, and this trial has {len(now)}"
    for number, (before, wanted) in enumerate(zip(then, now, strict=True)):
        reasons = _misfits(before["parameters"], wanted["parameters"])
        if len(before["groups"]) != len(wanted["groups"]):
            counts = f"{len(before['groups'])}, and this one has {len(wanted['groups'])}"
            reasons = [*reasons, f"its optimizer had {counts} groups of parameters"]
        if reasons:
            return (f"engine {number}: " if len(now) > 1 else "") + "; ".join(_most(reasons))
    return None


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


def put_into_effect(engines: Sequence[Any], then: Sequence[Record], now: Sequence[Record]) -> list[str]:
    """Apply settings that have changed since a loaded checkpoint was written.

    Returns:
        What became of the learning rate where a schedule has changed, in a line for each engine.

    Args:
        engines: The engines, loaded.
        then: What they were built with when it was written.
        now: What they are built with now.

    Raises:
        ConfigError: settings changed of a scheduler that computes each rate from the one before.
    """
    said = []
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
            rates = [group["lr"] for group in optimizer.param_groups]
            _reschedule(scheduler, before["scheduler"], wanted["scheduler"], wanted["groups"])
            pairs = zip(rates, (group["lr"] for group in optimizer.param_groups), strict=True)
            moved = [f"{was:.6g} -> {now:.6g}" for was, now in pairs if was != now]
            if moved:
                kind = type(scheduler).__name__
                said.append(f"{kind} goes on by its new settings: lr {', '.join(dict.fromkeys(moved))}")
    return said


def settings_kept(engines: Sequence[Any], now: Sequence[Record]) -> str:
    """The settings that differ from the configured ones after loading a checkpoint without a record, in words.

    The learning rate of an engine with a scheduler is not compared.
    """
    kept = []
    for engine, wanted in zip(engines, now, strict=True):
        scheduled = getattr(engine, "lr_scheduler", None) is not None
        names = [name for name in SETTINGS if name != "lr" or not scheduled]
        groups = getattr(engine.optimizer, "param_groups", ())
        for group, given in zip(groups, wanted["groups"], strict=False):
            kept += [
                f"{name} {group[name]}, not {given[name]}"
                for name in names
                if name in group and name in given and _plain(group[name], None) != given[name]
            ]
    return ", ".join(dict.fromkeys(kept))


def _reschedule(scheduler: Any, before: Record, wanted: Record, groups: Sequence[Record]) -> None:
    """Give a loaded scheduler its new settings, and set the rates of its current step by them.

    Source: DeepSpeed's schedulers (0.19.8, ``runtime/lr_schedules.py``) keep only their position in a checkpoint;
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
    closed = closed_form(scheduler)
    if closed is None:
        message = (
            "computes each rate from the one before: its settings, and the learning rate, must stay what they were "
            f"(these differ: {', '.join(sorted(changed)) or 'those of the optimizer'})"
        )
        kind, fix = (
            type(scheduler).__name__,
            (
                "restore the old settings, or start a new run from the weights: "
                "--set searcher.source_checkpoint_uuid=CHECKPOINT"
            ),
        )
        raise ConfigError(
            Problem(key="scheduler", value=kind, message=message, fix=fix, code="resume-changed")
        )
    _set_rates(scheduler, closed())


def closed_form(scheduler: Any) -> Callable[[], list[float]] | None:
    """Computes a scheduler's rates from its position alone; None where each is computed from the one before."""
    if hasattr(scheduler, "_get_closed_form_lr"):
        return scheduler._get_closed_form_lr  # type: ignore[no-any-return]
    if hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs"):
        return lambda: [
            base * rate(scheduler.last_epoch)
            for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
    # Source: get_lr of both in torch 2.13.0 reads last_epoch, the settings and no rate of a group.
    if isinstance(scheduler, (OneCycleLR, CyclicLR)):

        def rates() -> list[float]:
            scheduler._get_lr_called_within_step = True  # it warns otherwise
            try:
                return [float(rate) for rate in scheduler.get_lr()]
            finally:
                scheduler._get_lr_called_within_step = False

        return rates
    return None


def schedule_of(engines: Sequence[Any]) -> tuple[str, bool] | None:
    """The class of the engines' schedule, and whether its settings must stay what they were; None without one."""
    kinds = [
        (type(each).__name__, not hasattr(each, "last_batch_iteration") and closed_form(each) is None)
        for engine in engines
        if (each := getattr(engine, "lr_scheduler", None)) is not None
    ]
    return max(kinds, key=lambda kind: kind[1], default=None)


def _as_it_is(value: Any, current: Any) -> Any:
    """A recorded value in the type that its owner has: a tuple of betas, a ``Counter`` of milestones."""
    return type(current)(value) if isinstance(current, (tuple, dict)) else value


def _set_rates(scheduler: Any, rates: Sequence[float]) -> None:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)
