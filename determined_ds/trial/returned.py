"""Checks of what a trial's methods return: a message names the method, the value and what is expected.

Every check looks at Python types and at attributes of tensors; none waits for a device. Before training the error is a
:class:`TrialError`, in training a :class:`TrainingError`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from determined import pytorch

from determined_ds.errors import TrialError
from determined_ds.trial.author import Names, described, failed, method_of, wrong

logger = logging.getLogger("determined_ds")


def _check(right: bool, trial: Any, names: Names, value: Any, expected: str, fix: str, did: str = "") -> None:
    if not right:
        raise TrialError(wrong(trial, names, value, expected, fix, did=did))


# ------------------------------------------------------------------------------------------- before training


def model(trial: Any, value: Any, name: str = "build_model") -> torch.nn.Module:
    """Check ``build_model``, or a model of ``build_models``."""
    is_bare = isinstance(value, torch.nn.Module) and not isinstance(value, DeepSpeedEngine)
    fix = "return the bare model: the library calls deepspeed.initialize"
    _check(is_bare, trial, name, value, "a torch.nn.Module", fix)
    return value  # type: ignore[no-any-return]


def layers(trial: Any, value: Any, num_stages: int, chunks: int = 1) -> list[Any]:
    """Check ``build_layers``: at least one layer for each of the ``chunks`` parts of each stage."""
    name, expected = "build_layers", "a list of layers: modules, functions, LayerSpec or TiedLayerSpec"
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
    _check(is_list, trial, name, value, expected, "return its layers in a list: return [layer, layer, ...]")
    found = list(value)
    for layer in found:
        is_layer = isinstance(layer, LayerSpec) or (callable(layer) and not isinstance(layer, type))
        did, fix = f"returned {described(layer)} as a layer", "write LayerSpec(Class, ...), or a function"
        _check(is_layer, trial, name, layer, expected, fix, did)
    did = f"returned {len(found)} layer{'s' * (len(found) != 1)}, and pipe_parallel_size is {num_stages}"
    fix = f"return more layers, or set pipe_parallel_size to at most {max(1, len(found) // chunks)}"
    if chunks > 1:
        did += f" with pipe_chunks {chunks}"
        fix += ", or take a pipe_schedule of fewer chunks, such as 1f1b"
    enough = "at least one layer for each part of each stage"
    _check(len(found) >= num_stages * chunks, trial, name, value, enough, fix, did)
    return found


def optimizer(trial: Any, value: Any) -> torch.optim.Optimizer | None:
    """Check ``build_optimizer``."""
    expected = "a torch.optim.Optimizer of the given model's parameters, or None"
    fix = "return torch.optim.AdamW(self.build_parameters(model), lr=...)"
    is_one = value is None or isinstance(value, torch.optim.Optimizer)
    _check(is_one, trial, "build_optimizer", value, expected, fix)
    return value  # type: ignore[no-any-return]


def parameters(trial: Any, value: Any) -> list[Any]:
    """Check ``build_parameters``; torch checks what is in the list."""
    expected = "a list of parameters, or of groups such as {'params': [...], 'weight_decay': 0.0}"
    is_list = isinstance(value, Iterable) and not isinstance(value, (torch.Tensor, str, Mapping))
    fix = "return [p for p in model.parameters() if p.requires_grad]"
    _check(is_list, trial, "build_parameters", value, expected, fix)
    found = list(value)
    for group in found:
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])  # it is read here, and again by the optimizer
    return found


def groups(trial: Any, model: torch.nn.Module, optimizer: Any, parameters: Any) -> None:
    """Refuse an optimizer that would train nothing, and warn of parameters that are in none of its groups."""
    covered: set[int] = set()
    for group in optimizer.param_groups if optimizer is not None else parameters:
        found = group["params"] if isinstance(group, Mapping) else group
        covered.update(map(id, [found] if isinstance(found, torch.Tensor) else found))
    names: tuple[str, ...] = ("build_parameters" if optimizer is None else "build_optimizer",)
    if trial.is_whole and not covered.intersection(map(id, model.parameters())):
        did = "has no parameter of the model that requires a gradient, so nothing would be trained"
        names = (*names, "build_model") if optimizer is None else names
        fix = "use those of the given model: self.build_parameters(model)"
        _check(False, trial, names, optimizer, "parameters of the model", fix, did)
    missed = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missed and trial.context.distributed.rank == 0:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        logger.warning(
            "warning: %s does not name %s, which require a gradient and are never trained; name them, or turn their "
            "requires_grad off in build_model",
            *(method_of(trial, *names), ", ".join(missed[:3]) + more),
        )


def engines(trial: Any, found: list[Any]) -> None:
    """Check that a trial has wrapped an engine."""
    has_own = hasattr(trial, "build_model")
    fix = "call super().__init__(context) first" if has_own else "call it on the engine"
    did = "wrapped no engine"
    _check(bool(found), trial, "__init__", None, "context.wrap_model_engine(engine)", fix, did)


def callbacks(trial: Any, value: Any) -> dict[str, pytorch.PyTorchCallback]:
    """Check ``build_callbacks``; warn of methods that look like hooks and are never called."""
    found = list(value.values()) if isinstance(value, dict) else [value]
    are_right = isinstance(value, dict) and all(isinstance(each, pytorch.PyTorchCallback) for each in found)
    fix = 'return {"mine": MyCallback()}; the name is that of its state in a checkpoint'
    _check(are_right, trial, "build_callbacks", value, "a dict of names and PyTorchCallback objects", fix)
    hooks = {"on_step_end", *dir(pytorch.PyTorchCallback)}
    for callback in found if trial.context.distributed.rank == 0 else ():
        for name in (each for each in dir(callback) if each.startswith("on_") and each not in hooks):
            where = method_of(callback, name)
            logger.warning("warning: %s is not a hook of PyTorchCallback, and is never called", where)
    return value  # type: ignore[no-any-return]


def evaluation_reducer(trial: Any, value: Any) -> Any:
    """Check ``evaluation_reducer``."""
    expected = "a determined.pytorch.Reducer, or a dict of names of metrics and Reducers"
    fix = "return Reducer.AVG, SUM, MAX or MIN; any other reduction is a MetricReducer (context.wrap_reducer)"
    for one in value.values() if isinstance(value, Mapping) else [value]:
        _check(isinstance(one, pytorch.Reducer), trial, "evaluation_reducer", one, expected, fix)
    return value


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
    """Check the metrics that a method returned for a batch; a tensor alone is the loss.

    Args:
        trial: The trial.
        value: What the method returned.
        names: The method, and those that it calls unless the author replaced it.
    """
    if isinstance(value, torch.Tensor):
        return {"loss": value}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        fix = 'return {"name of a metric": value, ...}'
        raise failed(trial, names, value, "a dict of metrics by name", fix)
    return value
