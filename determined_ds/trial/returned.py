"""Checks of what a trial's methods return; none waits for a device. The error names the method, the value and the fix.

Before training it is a :class:`TrialError`, in training a :class:`TrainingError`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim.lr_scheduler import ReduceLROnPlateau

from determined_ds.config.fill import PEAKS
from determined_ds.errors import TrialError
from determined_ds.trial.author import Names, described, failed, is_of_library, method_of, refused, wrong

logger = logging.getLogger("determined_ds")
SCHEDULER, CYCLE = "build_scheduler", "e.g. OneCycleLR(optimizer, max_lr=..., total_steps=self.total_steps)"
NO_SCHEDULE = "--set hyperparameters.overwrite_deepspeed_args.scheduler=null"


def check(right: bool, trial: Any, names: Names, value: Any, expected: str, fix: str, did: str = "") -> None:
    """Refuse the trial where a value is not ``right``; the rest as for :func:`wrong`."""
    if not right:
        raise TrialError(wrong(trial, names, value, expected, fix, did=did))


# ------------------------------------------------------------------------------------------- before training


def model(trial: Any, value: Any, name: str = "build_model") -> torch.nn.Module:
    """Check ``build_model``, or a model of ``build_models``."""
    is_bare = isinstance(value, torch.nn.Module) and not isinstance(value, DeepSpeedEngine)
    fix = "return the bare model: the library calls deepspeed.initialize"
    check(is_bare, trial, name, value, "a torch.nn.Module", fix)
    return value  # type: ignore[no-any-return]


def layers(trial: Any, value: Any, num_stages: int, chunks: int = 1) -> list[Any]:
    """Check ``build_layers``: at least one layer for each of the ``chunks`` parts of each stage."""
    name, expected = "build_layers", "a list of layers: modules, functions, LayerSpec or TiedLayerSpec"
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
    check(is_list, trial, name, value, expected, "return its layers in a list: return [layer, layer, ...]")
    found = list(value)
    for layer in found:
        is_layer = isinstance(layer, LayerSpec) or (callable(layer) and not isinstance(layer, type))
        did, fix = f"returned {described(layer)} as a layer", "write LayerSpec(Class, ...), or a function"
        check(is_layer, trial, name, layer, expected, fix, did)
    did = f"returned {len(found)} layer{'s' * (len(found) != 1)}, and pipe_parallel_size is {num_stages}"
    fix = f"return more layers, or set pipe_parallel_size to at most {max(1, len(found) // chunks)}"
    if chunks > 1:
        did += f" with pipe_chunks {chunks}"
        fix += ", or take a pipe_schedule of fewer chunks, such as 1f1b"
    enough = "at least one layer for each part of each stage"
    check(len(found) >= num_stages * chunks, trial, name, value, enough, fix, did)
    return found


def trained(
    trial: Any, model: torch.nn.Module, ds_config: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer | None, list[Any] | None]:
    """What ``build_optimizer`` returned, or else the list that ``build_parameters`` did; the other is None.

    An optimizer that would train nothing is refused. Parameters that are in none of its groups are warned of, and a
    schedule of the JSON that sets the rate of groups which the author gave rates of their own: ``update_lr`` and
    ``_format_param`` in deepspeed 0.19.8's ``runtime/lr_schedules.py``.
    """
    name, optimizer, parameters = "build_optimizer", trial.build_optimizer(model), None
    expected = "a torch.optim.Optimizer of the given model's parameters, or None"
    fix = "return torch.optim.AdamW(self.build_parameters(model), lr=...)"
    check(isinstance(optimizer, torch.optim.Optimizer | None), trial, name, optimizer, expected, fix)
    names: tuple[str, ...] = (name,)
    if optimizer is None:
        name, value = "build_parameters", trial.build_parameters(model)
        expected = "a list of parameters, or of groups such as {'params': [...], 'weight_decay': 0.0}"
        is_list = isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, str, Mapping))
        fix = "return [p for p in model.parameters() if p.requires_grad]"
        check(is_list, trial, name, value, expected, fix)
        names, parameters = (name, "build_model"), list(value)
    groups: Any = parameters if optimizer is None else optimizer.param_groups
    covered: set[int] = set()
    for group in groups:
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])  # it is read here, and again by the optimizer
        found = group["params"] if isinstance(group, Mapping) else group
        covered.update(map(id, [found] if isinstance(found, torch.Tensor) else found))
    does_train = not trial.is_whole or bool(covered.intersection(map(id, model.parameters())))
    did = "has no parameter of the model that requires a gradient, so nothing would be trained"
    fix = "use those of the given model: self.build_parameters(model)"
    check(does_train, trial, names, optimizer, "parameters of the model", fix, did)
    missed = [each for each, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missed and trial.context.distributed.rank == 0:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        logger.warning(
            "warning: %s does not name %s, which require a gradient and are never trained; name them, or turn their "
            "requires_grad off in build_model",
            *(method_of(trial, name), ", ".join(missed[:3]) + more),
        )
    section = ds_config.get("scheduler") or {}
    kind = str(section.get("type"))
    peak = (section.get("params") or {}).get(PEAKS.get(kind, ""))
    own = {float(group["lr"]) for group in groups if isinstance(group, Mapping) and "lr" in group}
    if isinstance(peak, (int, float)) and not own <= {peak}:
        logger.warning(
            "warning: %s sets the rate of all groups, up to %g, not those of %s (%s); write a list of rates there, or "
            "return a schedule from %s, with %s",
            *(kind, peak, method_of(trial, name), ", ".join(f"{rate:g}" for rate in sorted(own))),
            *(SCHEDULER, NO_SCHEDULE),
        )
    return optimizer, parameters


def give_schedule(trial: Any, engine: Any, ds_config: dict[str, Any]) -> None:
    """Give an engine that was made of ``ds_config`` the schedule of ``build_scheduler``, where it returns one."""
    optimizer = getattr(engine, "basic_optimizer", engine.optimizer)
    if optimizer is None:
        return
    value, kind = trial.build_scheduler(optimizer), (ds_config.get("scheduler") or {}).get("type")
    if isinstance(value, ReduceLROnPlateau) or isinstance(engine.lr_scheduler, ReduceLROnPlateau):
        # Its step would be given the batch size: ``DeepSpeedEngine._take_model_step`` in deepspeed 0.19.8.
        key = "scheduler.type" if value is None else method_of(trial, SCHEDULER)
        message = "ReduceLROnPlateau steps by a metric of a validation; a schedule here steps at each optimizer step"
        raise refused(key, message, f"take {CYCLE}", "plateau")
    if value is None and (kind is not None or is_of_library(trial.build_scheduler)):
        return
    is_schedule = callable(getattr(value, "step", None)) and not isinstance(value, type)
    is_right = is_schedule and getattr(value, "optimizer", optimizer) is optimizer
    expected = "a schedule of torch.optim.lr_scheduler for the optimizer that it is given"
    check(is_right, trial, SCHEDULER, value, expected, f"return {CYCLE}")
    if kind is not None:
        message = f"the JSON's schedule would not be used: {method_of(trial, SCHEDULER)} returns another"
        fix = f"remove it from the JSON, or {NO_SCHEDULE}; or remove {SCHEDULER}"
        raise refused("scheduler.type", message, fix, "two-schedulers", value=kind)
    engine.lr_scheduler = value


# ------------------------------------------------------------------------------------------- in training


def losses(trial: Any, value: Any, *, trains: bool = True) -> dict[str, Any]:
    """Check ``loss``. Returns metrics by name; in training, with a ``loss`` that has a gradient."""
    found, is_named = value if isinstance(value, dict) else {"loss": value}, isinstance(value, dict)
    loss, expected = found.get("loss"), "a scalar tensor that requires a gradient"
    if trial.is_whole:
        expected += ", or a dict of metrics with 'loss'"
        if is_named and not trains:
            return found
    if is_named and not trial.is_whole:
        fix = "return the loss alone: a pipeline reports no other metric"
    elif is_named and "loss" not in found:
        fix = 'name the loss "loss": return {"loss": loss, ...}'
    elif not isinstance(loss, torch.Tensor):
        fix = "return the mean loss of the micro-batch, a tensor, without .item() or float()"
    elif loss.numel() != 1:
        fix = "reduce it: return loss.mean(), or leave reduction='none' out of the loss function"
    elif trains and not loss.requires_grad:
        fix = "compute it from model(...) without torch.no_grad(), .detach(), .item() or argmax"
    else:
        return found
    raise failed(trial, "loss", value, expected, fix)


def metrics(trial: Any, value: Any, *names: str) -> dict[str, Any]:
    """Check the metrics of a batch; a tensor alone is the loss. ``names`` are the methods, as in :func:`method_of`."""
    if isinstance(value, torch.Tensor):
        return {"loss": value}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        fix = 'return {"name of a metric": value, ...}'
        raise failed(trial, names, value, "a dict of metrics by name", fix)
    return value
