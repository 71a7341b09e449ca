"""An engine's state besides its tensors: settings of the optimizer's groups, its schedule, loss scale and counts.

A checkpoint restores the settings of the optimizer and of torch's schedulers with their state. It also holds a record
of what both were built with, so a setting that has changed since then takes effect, and one that the trial changed
during training is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from determined_ds.checkpoints.engine_slices import EngineSlices
from determined_ds.errors import ConfigError, Problem
from determined_ds.train.memory import base_optimizer

Record = dict[str, Any]
MOST_NAMED = 3
# Attributes of a scheduler that are its position, not its settings.
POSITION = ("last_epoch", "last_batch_iteration", "_last_lr", "_step_count")
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Of DeepSpeed's loss scalers, what changes during training.
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_ABSENT = object()

# ------------------------------------------------------------------------------------------- what it was built with


def records_of(engines: Sequence[Any]) -> list[Record]:
    """What each engine was built with; call it before anything is loaded or trained."""
    found = []
    for engine in engines:
        optimizer = getattr(engine, "optimizer", None)
        clip_grad = _plain(getattr(optimizer, "clip_grad", None))
        found.append(
            {
                "groups": [_plain_items(group) for group in getattr(optimizer, "param_groups", None) or []],
                "clip_grad": None if clip_grad is _ABSENT else clip_grad,
                "scheduler": _plain_items(getattr(getattr(engine, "lr_scheduler", None), "__dict__", {})),
            }
        )
    return found


def _plain_items(items: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _plain(value) for key, value in items.items() if key != "params"}
    return {key: value for key, value in found.items() if value is not _ABSENT}


def _plain(value: Any) -> Any:
    """A value that a checkpoint can hold as it is; any other is absent."""
    if hasattr(value, "last_epoch"):  # a scheduler inside another one
        return _plain_items(vars(value))
    if isinstance(value, Mapping):
        return _plain_items(value)
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _ABSENT if any(item is _ABSENT for item in items) else items
    return value if isinstance(value, (bool, int, float, str, type(None))) else _ABSENT


def some_of(reasons: Sequence[str]) -> str:
    """The first reasons, and how many more there are."""
    more = [f"and {len(reasons) - MOST_NAMED} more"] if len(reasons) > MOST_NAMED else []
    return "; ".join([*reasons[:MOST_NAMED], *more])


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


def put_settings(own: EngineSlices, stored: Mapping[str, Any], *, optimizer: bool) -> None:
    """Give an engine the settings of a checkpoint."""
    engine = own.engine
    if optimizer:
        for number, group in enumerate(base_optimizer(engine).param_groups if own.held else ()):
            if (found := _stored_group(own, stored, number)) is not None:
                group.update({key: value for key, value in found["settings"].items() if key != "params"})
        _put_loss_scale(engine, stored["loss_scale"])
    if getattr(engine, "lr_scheduler", None) is not None and stored["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(stored["lr_scheduler"])
    for name, value in stored["counters"].items():
        if hasattr(engine, name):
            setattr(engine, name, value)
    if not isinstance(engine, PipelineEngine):  # a checkpoint is between steps
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()


def built_then(own: EngineSlices, stored: Mapping[str, Any], now: Record) -> Record:
    """What the engine in a checkpoint was built with, its groups in the order of this engine's."""
    found = [_stored_group(own, stored, number) for number in range(len(now["groups"]))]
    groups = [
        group if then is None else then["built"] for group, then in zip(now["groups"], found, strict=True)
    ]
    return {"groups": groups, **stored["built"]}


def _names_in_group(own: EngineSlices, number: int) -> list[str]:
    """The parameters in a group of the optimizer, of those that this rank holds a part of."""
    return [own.name_of(lies.parameter) for held in own.held if held.group == number for lies in held.lies]


def _stored_group(own: EngineSlices, stored: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """The group of a checkpoint that holds the parameters of a group here; by its number where none is known."""
    names, groups = set(_names_in_group(own, number)), stored["groups"]
    by_number = groups[number] if number < len(groups) else None
    found: dict[str, Any] | None = next((each for each in groups if names & set(each["names"])), by_number)
    return found


def _loss_scaler(engine: Any) -> Any:
    """What keeps DeepSpeed's loss scale; None where there is none."""
    config = getattr(engine.optimizer, "loss_scale_config", None)
    if config is not None:
        return config if getattr(config, "use_grad_scaling", True) else None
    return getattr(engine.optimizer, "loss_scaler", None)


def _put_loss_scale(engine: Any, stored: Mapping[str, Any]) -> None:
    if "cur_scale" not in stored:
        return
    scaler = _loss_scaler(engine)
    for key in SCALE:
        if key in stored and hasattr(scaler, key):
            setattr(scaler, key, stored[key])


# ------------------------------------------------------------------------------------------- what changed since


def put_into_effect(engines: Sequence[Any], then: Sequence[Record], now: Sequence[Record]) -> list[str]:
    """Apply settings that have changed since a loaded checkpoint was written."""
    said = []
    for engine, before, wanted in zip(engines, then, now, strict=True):
        changed = {key for key in ("groups", "clip_grad", "scheduler") if before[key] != wanted[key]}
        if not changed:
            continue
        optimizer, scheduler = engine.optimizer, getattr(engine, "lr_scheduler", None)
        if "clip_grad" in changed:
            optimizer.clip_grad = wanted["clip_grad"]
        for group, old, new in zip(optimizer.param_groups, before["groups"], wanted["groups"], strict=True):
            for key, value in new.items():
                if old.get(key, _ABSENT) != value and (key != "lr" or scheduler is None):
                    group[key] = _as_it_is(value, group.get(key))
        if scheduler is not None and changed & {"groups", "scheduler"}:
            rates = [group["lr"] for group in optimizer.param_groups]
            _reschedule(scheduler, before["scheduler"], wanted["scheduler"], wanted["groups"])
            pairs = zip(rates, (group["lr"] for group in optimizer.param_groups), strict=True)
            if moved := [f"{was:.6g} -> {now:.6g}" for was, now in pairs if was != now]:
                kind = type(scheduler).__name__
                said.append(f"{kind} goes on by its new settings: lr {', '.join(dict.fromkeys(moved))}")
    return said


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
    closed = _closed_form(scheduler)
    if closed is None:
        message = (
            "computes each rate from the one before: its settings, and the learning rate, must stay what they were "
            f"(these differ: {', '.join(sorted(changed)) or 'those of the optimizer'})"
        )
        fix = "restore the old settings, or start a new run from the weights: "
        fix += "--set searcher.source_checkpoint_uuid=CHECKPOINT"
        kind = type(scheduler).__name__
        raise ConfigError(
            Problem(key="scheduler", value=kind, message=message, fix=fix, code="resume-changed")
        )
    _set_rates(scheduler, closed())


def _closed_form(scheduler: Any) -> Callable[[], list[float]] | None:
    """Computes a scheduler's rates from its position alone; None where each is computed from the one before."""
    if hasattr(scheduler, "_get_closed_form_lr"):
        return scheduler._get_closed_form_lr  # type: ignore[no-any-return]
    if hasattr(scheduler, "lr_lambdas") and hasattr(scheduler, "base_lrs"):
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        return lambda: [base * rate(scheduler.last_epoch) for base, rate in pairs]
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


def _as_it_is(value: Any, current: Any) -> Any:
    """A recorded value in the type that its owner has: a tuple of betas, a ``Counter`` of milestones."""
    return type(current)(value) if isinstance(current, (tuple, dict)) else value


def _set_rates(scheduler: Any, rates: Sequence[float]) -> None:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)
