"""What the methods of an author's code return, checked: an error names the method, its place, the value and the fix.

Before training it is a :class:`TrialError`, in training a :class:`TrainingError`. No check waits for a device.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from determined import pytorch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from determined_ds.config.fill import PEAKS
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, TrainingError, TrialError, shown

logger = logging.getLogger("determined_ds")
# A method that is defined in one of these packages is not the author's.
LIBRARIES = ("determined_ds", "determined", "deepspeed", "torch")
# A method, or several, the outermost first, such as ``train_batch`` and ``loss``: the author's first one is named.
Names = str | tuple[str, ...]
SCHEDULER, CYCLE = "build_scheduler", "e.g. OneCycleLR(optimizer, max_lr=..., total_steps=self.total_steps)"
NO_SCHEDULE = "--set hyperparameters.overwrite_deepspeed_args.scheduler=null"


def refused(key: str, message: str, fix: str, code: str, *, value: Any = NOT_GIVEN) -> ConfigError:
    """The error of one problem."""
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix, code=code))


def failed(owner: Any, names: Names, value: Any, expected: str, fix: str, *, did: str = "") -> TrainingError:
    """The error of a value that a method of ``owner`` returned; ``did`` is said instead of "returned ..."."""
    if value is None and not did:
        fix = f"add the missing return statement: {fix}"
    elif isinstance(value, type) and not did:
        fix = f"call it: return {value.__name__}(...)"
    key, origin = _found(owner, names)
    message = f"{did or f'returned {described(value)}'}; expected {expected}"
    return TrainingError(Problem(key=key, origin=origin, message=message, fix=fix, code="returned"))


def check(right: bool, owner: Any, names: Names, value: Any, expected: str, fix: str, did: str = "") -> None:
    """Refuse the trial where a value is not ``right``; the rest as for :func:`failed`."""
    if not right:
        raise TrialError(failed(owner, names, value, expected, fix, did=did).args[0])


def method_of(owner: Any, *names: str) -> str:
    """``MyTrial.loss (model_defs/mine/trial.py:17)``, of a trial, a callback or a reducer."""
    name, place = _found(owner, names)
    return f"{name} ({place})" if place else name


def _found(owner: Any, names: Names) -> tuple[str, str]:
    """The method, and where it begins, relative to the context directory; "" of a library's."""
    names = (names,) if isinstance(names, str) else names
    name = next((each for each in names if not _is_of_library(getattr(owner, each, None))), "")
    method, place = getattr(owner, name, None), ""
    with contextlib.suppress(TypeError, OSError):  # it has no source
        file, line = inspect.getsourcefile(inspect.unwrap(method)), inspect.getsourcelines(method)[1]  # type: ignore[arg-type]
        path = Path(str(file)).resolve()
        place = f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else file}:{line}"
    return f"{type(owner).__name__}.{name or names[0]}", place


def _is_of_library(defined: Any) -> bool:
    return (getattr(defined, "__module__", None) or LIBRARIES[0]).split(".")[0] in LIBRARIES


def described(value: Any) -> str:
    """A value in a few words: ``None``, ``a tuple of 2: Tensor, Tensor``, ``a tensor of shape (4, 1)``."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if value is None or isinstance(value, (int, float, str, type)):
        return "None" if value is None else f"the {name} {shown(value)}"
    if isinstance(value, (Mapping, list, tuple)):
        say = shown if isinstance(value, Mapping) else lambda each: type(each).__name__
        return f"a {name} of {len(value)}: {', '.join(map(say, list(value)[:8]))}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def model(trial: Any, value: Any, name: str = "build_model") -> torch.nn.Module:
    """Check ``build_model``, or a model of ``build_models``: the library calls ``deepspeed.initialize``."""
    is_bare = isinstance(value, torch.nn.Module) and not hasattr(value, "train_micro_batch_size_per_gpu")
    check(is_bare, trial, name, value, "a bare torch.nn.Module, not an engine", "return the model")
    return value  # type: ignore[no-any-return]


def layers(trial: Any, value: Any, num_stages: int, chunks: int = 1) -> list[Any]:
    """Check ``build_layers``: at least one layer for each of the ``chunks`` parts of each stage."""
    from deepspeed.pipe import LayerSpec

    name, expected = "build_layers", "a list of layers: modules, functions, LayerSpec or TiedLayerSpec"
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
    check(is_list, trial, name, value, expected, "return its layers in a list: return [layer, layer, ...]")
    found, parts = list(value), num_stages * chunks
    for layer in found:
        is_layer = isinstance(layer, LayerSpec) or (callable(layer) and not isinstance(layer, type))
        did, fix = f"returned {described(layer)} as a layer", "write LayerSpec(Class, ...), or a function"
        check(is_layer, trial, name, layer, expected, fix, did)
    did, expected = f"returned {len(found)} for {parts} parts", "a layer or more for each part of each stage"
    fix = f"return more layers, or take a pipe_parallel_size x pipe_chunks of at most {len(found)}"
    check(len(found) >= parts, trial, name, value, expected, fix, did)
    return found


def trained(
    trial: Any, model: torch.nn.Module, ds_config: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer | None, list[Any] | None]:
    """What ``build_optimizer`` returned, or else the list that ``build_parameters`` did; the other is None.

    An optimizer that would train nothing is refused. Warned of are parameters in none of its groups, and a schedule of
    the JSON that sets the rate of groups with rates of their own (deepspeed 0.19.8's ``runtime/lr_schedules.py``).
    """
    name, optimizer, parameters = "build_optimizer", trial.build_optimizer(model), None
    is_right, expected = (
        isinstance(optimizer, torch.optim.Optimizer | None),
        "a torch.optim.Optimizer, or None",
    )
    fix = "return torch.optim.AdamW(self.build_parameters(model), lr=...)"
    check(is_right, trial, name, optimizer, expected, fix)
    if optimizer is None:
        name, value = "build_parameters", trial.build_parameters(model)
        expected = "a list of parameters, or of groups such as {'params': [...], 'weight_decay': 0.0}"
        is_list = isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, str, Mapping))
        fix = "return [p for p in model.parameters() if p.requires_grad]"
        check(is_list, trial, name, value, expected, fix)
        parameters = list(value)
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
    check(does_train, trial, (name, "build_model"), optimizer, "parameters of the model", fix, did)
    if trial.context.distributed.rank != 0:
        return optimizer, parameters
    method = method_of(trial, name)
    if missed := [each for each, p in model.named_parameters() if p.requires_grad and id(p) not in covered]:
        names = ", ".join(missed[:3]) + (f" and {len(missed) - 3} more" if missed[3:] else "")
        fix = "name them, or turn their requires_grad off in build_model"
        logger.warning("warning: %s does not name %s, which are never trained; %s", method, names, fix)
    section = ds_config.get("scheduler") or {}
    peak = (section.get("params") or {}).get(PEAKS.get(kind := str(section.get("type")), ""))
    own = {float(group["lr"]) for group in groups if isinstance(group, Mapping) and "lr" in group}
    if isinstance(peak, (int, float)) and not own <= {peak}:
        stated, fix = (
            ", ".join(f"{rate:g}" for rate in sorted(own)),
            f"return one from {SCHEDULER}, {NO_SCHEDULE}",
        )
        said = f"{kind} sets the rate of all groups, up to {peak:g}, not those of {method} ({stated})"
        logger.warning("warning: %s; write a list of rates there, or %s", said, fix)
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
    if value is None and (kind is not None or _is_of_library(trial.build_scheduler)):
        return
    is_right = callable(getattr(value, "step", None)) and not isinstance(value, type)
    is_right = is_right and getattr(value, "optimizer", optimizer) is optimizer
    expected = "a schedule of torch.optim.lr_scheduler for the optimizer that it is given"
    check(is_right, trial, SCHEDULER, value, expected, f"return {CYCLE}")
    if kind is not None:
        message = f"the JSON's schedule would not be used: {method_of(trial, SCHEDULER)} returns another"
        fix = f"remove it from the JSON, or {NO_SCHEDULE}; or remove {SCHEDULER}"
        raise refused("scheduler.type", message, fix, "two-schedulers", value=kind)
    engine.lr_scheduler = value


def losses(trial: Any, value: Any, *, trains: bool = True) -> dict[str, Any]:
    """Check ``loss``. Returns metrics by name; in training, with a ``loss`` that has a gradient."""
    is_named, is_whole = isinstance(value, dict), trial.is_whole
    found = value if is_named else {"loss": value}
    loss, expected = found.get("loss"), "a scalar tensor that requires a gradient"
    is_scalar = isinstance(loss, torch.Tensor) and loss.numel() == 1 and (loss.requires_grad or not trains)
    if (is_named and is_whole and not trains) or (is_scalar and (is_whole or not is_named)):
        return found
    expected += ", or a dict with it as 'loss'" if is_whole else ": a pipeline reports no other metric"
    fix = "return the mean loss of the micro-batch as model(...) gave it, without .item(), .detach() or no_grad()"
    raise failed(trial, "loss", value, expected, fix)


def metrics(trial: Any, value: Any, *names: str) -> dict[str, Any]:
    """Check the metrics of a batch; a tensor alone is the loss. ``names`` are the methods, as in :func:`method_of`."""
    if isinstance(value, torch.Tensor):
        return {"loss": value}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise failed(
            trial, names, value, "a dict of metrics by name", 'return {"name of a metric": value, ...}'
        )
    return value


def built_callbacks(trial: Any, context: Any) -> dict[str, Any]:
    """What a trial's ``build_callbacks`` returns, checked."""
    fix, called = (
        "call super().__init__(context) first, or it on the engine",
        "context.wrap_model_engine(engine)",
    )
    check(bool(context.models), trial, "__init__", None, called, fix, "wrapped no engine")
    found, kind = trial.build_callbacks(), pytorch.PyTorchCallback
    are_right = isinstance(found, dict) and all(isinstance(each, kind) for each in found.values())
    fix = 'return {"mine": MyCallback()}; the name is that of its state in a checkpoint'
    check(are_right, trial, "build_callbacks", found, "a dict of names and PyTorchCallback objects", fix)
    for callback in found.values() if context.distributed.rank == 0 else ():
        for name in set(dir(callback)) - {"on_step_end", *dir(kind)}:
            if name.startswith("on_"):
                where = method_of(callback, name)
                logger.warning("warning: %s is not a hook of PyTorchCallback, and is never called", where)
    return dict(found)
