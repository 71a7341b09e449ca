"""Checks of what a trial's methods return: a message names the method, the value and what is expected.

Every check looks at Python types and at attributes of tensors; none waits for a device. Before training the error is a
:class:`TrialError`, in training a :class:`TrainingError`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from determined import pytorch

from determined_ds.documents.document import nearest
from determined_ds.errors import Problem, TrainingError, TrialError
from determined_ds.pipe.partition import BY_TYPE, METHODS, method_problem
from determined_ds.trial.author import described, failed, method_of, written_by_author, wrong

logger = logging.getLogger("determined_ds")

SCALAR_LOSS = "a scalar tensor that requires a gradient"


def _refuse(trial: Any, name: str, value: Any, expected: str, fix: str, did: str = "") -> NoReturn:
    raise TrialError(wrong(trial, name, value, expected, fix, did=did))


# ------------------------------------------------------------------------------------------- before training


def model(trial: Any, value: Any, name: str = "build_model") -> torch.nn.Module:
    """Check ``build_model``, or a model of ``build_models``."""
    if isinstance(value, DeepSpeedEngine) or not isinstance(value, torch.nn.Module):
        fix = "return the bare model: the library calls deepspeed.initialize"
        _refuse(trial, name, value, "a torch.nn.Module", fix)
    return value


def layers(trial: Any, value: Any, num_stages: int, chunks: int = 1) -> list[Any]:
    """Check ``build_layers``: at least one layer for each of the ``chunks`` parts of each stage."""
    name, expected = "build_layers", "a list of layers: modules, functions, LayerSpec or TiedLayerSpec"
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        _refuse(trial, name, value, expected, "return its layers in a list: return [layer, layer, ...]")
    found = list(value)
    for index, layer in enumerate(found):
        if isinstance(layer, type) or not (isinstance(layer, LayerSpec) or callable(layer)):
            kind = layer.__name__ if isinstance(layer, type) else type(layer).__name__
            fix = f"write LayerSpec({kind}, ...), or a module or function that computes it"
            _refuse(trial, name, layer, expected, fix, f"returned {described(layer)} as layer {index}")
    if len(found) < num_stages * chunks:
        did = f"returned {len(found)} layer{'s' * (len(found) != 1)}, and pipe_parallel_size is {num_stages}"
        fix = f"return more layers, or set pipe_parallel_size to at most {max(1, len(found) // chunks)}"
        if chunks > 1:
            did += f" with pipe_chunks {chunks}"
            fix += ", or take a pipe_schedule of fewer chunks, such as 1f1b"
        _refuse(trial, name, value, "at least one layer for each part of each stage", fix, did)
    return found


def partition_method(trial: Any, value: Any, layers: Iterable[Any]) -> str:
    """Check the attribute ``partition_method``, or the hyperparameter that overrides it, with the layers to share out.

    Source: ``PipelineModule._find_layer_type`` in deepspeed 0.19.8's runtime/pipe/module.py.
    """
    message = method_problem(value)
    if not message and str(value).startswith(BY_TYPE):
        kinds = [getattr(layer, "typename", layer) for layer in layers]
        kinds = [type(kind) if isinstance(kind, torch.nn.Module) else kind for kind in kinds]
        names = dict.fromkeys(str(kind.__name__) for kind in kinds if hasattr(kind, "__name__"))
        if not any(re.search(str(value).removeprefix(BY_TYPE), name, re.IGNORECASE) for name in names):
            message = f"matches no layer: they are {', '.join(names) or 'functions without a name'}"
    if message:
        is_stated = trial.resolved.strategy.partition_method is not None
        key = f"{'hyperparameters' if is_stated else type(trial).__name__}.partition_method"
        fix = f"use {', '.join(METHODS)} or e.g. type:Block"
        raise TrialError(Problem(key=key, value=value, message=message, fix=fix, code="partition-method"))
    return str(value)


def optimizer(trial: Any, model: torch.nn.Module, value: Any) -> torch.optim.Optimizer | None:
    """Check ``build_optimizer``, which was called with ``model``."""
    name, expected = "build_optimizer", "a torch.optim.Optimizer of the given model's parameters, or None"
    fix = "return torch.optim.AdamW(self.build_parameters(model), lr=...)"
    if value is None:
        return None
    if not isinstance(value, torch.optim.Optimizer):
        _refuse(trial, name, value, expected, fix)
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(each) in own for group in value.param_groups for each in group["params"]):
        did = f"returned {described(value)} that has no parameter of the model, so nothing would be trained"
        _refuse(trial, name, value, expected, fix, did)
    return value


def parameters(trial: Any, value: Any) -> list[Any]:
    """Check ``build_parameters``."""
    name, fix = "build_parameters", "return [p for p in model.parameters() if p.requires_grad]"
    expected = "a list of parameters, or of groups such as {'params': [...], 'weight_decay': 0.0}"
    if isinstance(value, (torch.Tensor, str, Mapping)) or not isinstance(value, Iterable):
        _refuse(trial, name, value, expected, fix)
    found = list(value)
    for each in found:
        if not isinstance(each, torch.Tensor) and not (isinstance(each, Mapping) and "params" in each):
            _refuse(trial, name, each, expected, fix, f"returned {described(each)} in a list")
    if not found and trial.is_whole:
        did = "returned no parameter that requires a gradient"
        _refuse(trial, written_by_author(trial, name, "build_model"), value, expected, fix, did)
    return found


def groups(trial: Any, model: torch.nn.Module, optimizer: Any, parameters: Any) -> None:
    """Warn of parameters that are in no group of the optimizer."""
    given: list[Any] = optimizer.param_groups if optimizer is not None else list(parameters)
    if given and not isinstance(given[0], Mapping):
        given = [{"params": given}]
    found = []
    for group in given:
        listed = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        found.append({id(each) for each in listed})
    covered = set().union(*found)
    missed = [
        name for name, each in model.named_parameters() if each.requires_grad and id(each) not in covered
    ]
    if missed and trial.context.distributed.rank == 0:
        method = method_of(trial, "build_parameters" if optimizer is None else "build_optimizer")
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        logger.warning(
            "warning: %s does not name %s, which require a gradient and are never trained; name them, or turn their "
            "requires_grad off in build_model",
            *(method, ", ".join(missed[:3]) + more),
        )


def engines(trial: Any, found: list[Any]) -> None:
    """Check that a trial has wrapped an engine."""
    if not found:
        has_own = hasattr(trial, "build_model")
        fix = "call super().__init__(context) first" if has_own else "call it on the engine"
        _refuse(trial, "__init__", None, "context.wrap_model_engine(engine)", fix, "wrapped no engine")


def loader(trial: Any, name: str, value: Any) -> Any:
    """Check ``build_training_data_loader`` or ``build_validation_data_loader``."""
    if value is None or isinstance(value, (torch.utils.data.Dataset, torch.Tensor, type, int, float, str)):
        method = "training_loader" if "training" in name else "validation_loader"
        fix = f"self.{method}(dataset)" if hasattr(trial, method) else "DataLoader(dataset, batch_size)"
        _refuse(trial, name, value, "a data loader", f"return {fix}")
    return value


def loader_arguments(trial: Any, method: str, options: Mapping[str, Any]) -> None:
    """Refuse a ``batch_size`` of ``self.training_loader`` or ``self.validation_loader``, which have one."""
    if "batch_size" in options:
        name = f"self.{method}"
        message = (
            f"got batch_size={options['batch_size']!r}; it is the micro-batch size, {trial.micro_batch_size}"
        )
        fix = (
            f"leave batch_size out: {name}(dataset); its size is set by global_batch_size, or by "
            "train_micro_batch_size_per_gpu in the DeepSpeed JSON"
        )
        raise TrialError(Problem(key=name, message=message, fix=fix, code="loader-batch-size"))


def callbacks(trial: Any, value: Any) -> dict[str, pytorch.PyTorchCallback]:
    """Check ``build_callbacks``; warn of methods that look like hooks and are never called."""
    found = list(value.values()) if isinstance(value, dict) else [value]
    if not isinstance(value, dict) or not all(isinstance(each, pytorch.PyTorchCallback) for each in found):
        fix = 'return {"mine": MyCallback()}; the name is that of its state in a checkpoint'
        _refuse(trial, "build_callbacks", value, "a dict of names and PyTorchCallback objects", fix)
    hooks = {"on_step_end", *dir(pytorch.PyTorchCallback)}
    for callback in found if trial.context.distributed.rank == 0 else ():
        for name in dir(callback):
            if name.startswith("on_") and name not in hooks:
                guess = nearest(name, sorted(hooks))
                meant = f"; did you mean {guess}?" if guess else ""
                where = method_of(callback, name)
                logger.warning(
                    "warning: %s is not a hook of PyTorchCallback, and is never called%s", where, meant
                )
    return value


def evaluation_reducer(trial: Any, value: Any) -> Any:
    """Check ``evaluation_reducer``."""
    for one in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(one, pytorch.Reducer):
            expected = "a determined.pytorch.Reducer, or a dict of names of metrics and Reducers"
            fix = "return Reducer.AVG, SUM, MAX or MIN; any other reduction is a MetricReducer (context.wrap_reducer)"
            _refuse(trial, "evaluation_reducer", one, expected, fix)
    return value


# ------------------------------------------------------------------------------------------- in training


def training_loss(trial: Any, value: Any) -> dict[str, Any]:
    """Check ``loss`` in training. Returns metrics by name, with a ``loss`` that has a gradient."""
    if not isinstance(value, dict):
        return {"loss": _descendable(trial, value, "")}
    if "loss" not in value:
        raise _wrong_loss(trial, value, 'name the loss "loss": return {"loss": loss, ...}')
    return {**value, "loss": _descendable(trial, value["loss"], "a dict whose 'loss' is ")}


def evaluated_loss(trial: Any, value: Any) -> dict[str, Any]:
    """Check ``loss`` in evaluation. Returns metrics by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"loss": value}
    raise _wrong_loss(trial, value)


def pipeline_loss(trial: Any, value: Any) -> torch.Tensor:
    """Check ``loss`` on the last stage of a pipeline, in training or in evaluation."""
    if isinstance(value, dict):
        fix = "return the loss alone: a pipeline reports no other metric"
        raise failed(trial, "loss", value, SCALAR_LOSS, fix)
    return _descendable(trial, value, "") if torch.is_grad_enabled() else evaluated_loss(trial, value)["loss"]


def _descendable(trial: Any, loss: Any, prefix: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        fix = "return the tensor itself, without .item() or float()" if isinstance(loss, float) else ""
        raise _wrong_loss(trial, loss, fix, prefix)
    if loss.numel() != 1:
        fix = "reduce it: return loss.mean(), or leave reduction='none' out of the loss function"
        raise _wrong_loss(trial, loss, fix, prefix)
    if not loss.requires_grad:
        fix = "compute it from model(...) without torch.no_grad(), .detach(), .item() or argmax"
        raise _wrong_loss(trial, loss, fix, prefix, " that requires no gradient")
    return loss


def _wrong_loss(trial: Any, value: Any, fix: str = "", prefix: str = "", suffix: str = "") -> TrainingError:
    is_whole = getattr(trial, "is_whole", True)
    expected = SCALAR_LOSS + (", or a dict of metrics with 'loss'" if is_whole else "")
    did = f"returned {prefix}{described(value)}{suffix}" if prefix or suffix else ""
    return failed(trial, "loss", value, expected, fix or "return the mean loss of the micro-batch", did=did)


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
        raise failed(trial, written_by_author(trial, *names), value, "a dict of metrics by name", fix)
    return value
