"""An engine's state besides its tensors: settings of the optimizer's groups, its schedule, loss scale and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from determined_ds.runtime.checkpoints.built import Record
from determined_ds.runtime.checkpoints.slices import EngineSlices
from determined_ds.runtime.checkpoints.state_bytes import base_optimizer

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Of DeepSpeed's loss scalers, what changes during training.
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def settings_of(own: EngineSlices, built: Record) -> dict[str, Any]:
    """What a checkpoint holds of an engine besides its tensors.

    Args:
        own: The engine.
        built: What it was built with, see :func:`~determined_ds.runtime.checkpoints.built.records_of`.
    """
    engine = own.engine
    names = group_names(own)
    groups = [] if engine.optimizer is None else base_optimizer(engine).param_groups
    scheduler = getattr(engine, "lr_scheduler", None)
    return {
        "groups": [
            {
                "names": names.get(number, []),
                "settings": {key: value for key, value in group.items() if key != "params"},
                "built": was,
            }
            for number, (group, was) in enumerate(zip(groups, built["groups"], strict=True))
        ],
        "built": {key: built[key] for key in ("clip_grad", "scheduler")},
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
        "loss_scale": _loss_scale(engine),
        "counters": {name: getattr(engine, name) for name in COUNTERS if hasattr(engine, name)},
    }


def group_names(own: EngineSlices) -> dict[int, list[str]]:
    """Number of a group of the optimizer -> names of parameters in it, of those that this rank holds a part of."""
    found: dict[int, list[str]] = {}
    for held in own.held:
        found.setdefault(held.group, []).extend(own.name_of(lies.parameter) for lies in held.lies)
    return found


def put_settings(own: EngineSlices, stored: Mapping[str, Any], *, optimizer: bool) -> None:
    """Give an engine the settings of a checkpoint.

    Args:
        own: The engine.
        stored: From :func:`settings_of`, of all pipeline stages.
        optimizer: Whether the optimizer's settings and the loss scale are taken too.
    """
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
    groups = []
    for number, group in enumerate(now["groups"]):
        found = _stored_group(own, stored, number)
        groups.append(group if found is None else found["built"])
    return {"parameters": now["parameters"], "groups": groups, **stored["built"]}


def _stored_group(own: EngineSlices, stored: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """The group of a checkpoint that holds the parameters of a group here; by its number where none is known."""
    names = set(group_names(own).get(number, []))
    groups = stored["groups"]
    if (match := next((group for group in groups if names & set(group["names"])), None)) is not None:
        return dict(match)
    return dict(groups[number]) if number < len(groups) else None


# ------------------------------------------------------------------------------------------- the loss scale


def _scaler(engine: Any) -> Any:
    """What keeps DeepSpeed's loss scale; None where there is none."""
    config = getattr(engine.optimizer, "loss_scale_config", None)
    if config is not None:
        return config if getattr(config, "use_grad_scaling", True) else None
    return getattr(engine.optimizer, "loss_scaler", None)


def _loss_scale(engine: Any) -> dict[str, Any]:
    own = getattr(engine, "_scaler", None)  # of torch's DistributedDataParallel
    if own is not None:
        return {"cur_scale": own.get_scale(), "growth_tracker": own.state_dict()["_growth_tracker"]}
    scaler = _scaler(engine)
    return {key: getattr(scaler, key) for key in SCALE if hasattr(scaler, key)}


def _put_loss_scale(engine: Any, stored: Mapping[str, Any]) -> None:
    if "cur_scale" not in stored:
        return
    own = getattr(engine, "_scaler", None)
    if own is not None:
        since = stored.get("cur_iter", 0) - stored.get("last_overflow_iter", -1) - 1
        window = own.state_dict()["growth_interval"]
        own.load_state_dict(
            {
                **own.state_dict(),
                "scale": stored["cur_scale"],
                "_growth_tracker": stored.get("growth_tracker", since % max(window, 1)),
            }
        )
        return
    scaler = _scaler(engine)
    for key in SCALE:
        if key in stored and hasattr(scaler, key):
            setattr(scaler, key, stored[key])
