"""Checks of what a trial's methods return: a message names the method, the value and what is expected.

Every check looks at Python types and at attributes of tensors; none waits for a device. Before training the error is a
:class:`TrialError`, in training a :class:`TrainingError`.
"""

from __future__ import annotations

import inspect
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
from determined_ds.trial.author import described, failed, is_of_library, method_of, written_by_author, wrong
from determined_ds.trial.stream_loader import is_stream

logger = logging.getLogger("determined_ds")

SCALAR_LOSS = "a scalar tensor that requires a gradient"


def _refuse(trial: Any, name: str, value: Any, expected: str, fix: str, did: str = "") -> NoReturn:
    raise TrialError(wrong(trial, name, value, expected, fix, did=did))


# ------------------------------------------------------------------------------------------- before training


def signatures(trial: Any) -> None:
    """Check that an author's methods take the arguments that the library's of that name take; all problems at once."""
    problems = []
    for name in sorted(set(dir(type(trial)))):
        method = getattr(type(trial), name)
        classes = [each for each in type(trial).__mro__ if is_of_library(each) and name in vars(each)]
        ours = vars(classes[0])[name] if classes else None
        if name.startswith("_") or not inspect.isfunction(ours) or is_of_library(method):
            continue
        parameters = list(inspect.signature(ours).parameters.values())[1:]
        given = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        try:
            found = inspect.signature(getattr(trial, name))
        except (TypeError, ValueError):  # not a function, or one without a signature
            continue
        try:
            found.bind(*given)
        except TypeError:
            expected = f"{name}({', '.join(['self', *given])})"
            did = f"is defined with the arguments {found}"
            problems.append(wrong(trial, name, method, expected, f"write def {expected}", did=did))
    if problems:
        raise TrialError(problems)


def model(trial: Any, value: Any) -> torch.nn.Module:
    """Check ``build_model``."""
    if isinstance(value, DeepSpeedEngine) or not isinstance(value, torch.nn.Module):
        fix = "return the bare model: the library calls deepspeed.initialize"
        _refuse(trial, "build_model", value, "a torch.nn.Module", fix)
    return value


def models(trial: Any, value: Any) -> dict[str, torch.nn.Module]:
    """Check ``build_models``."""
    name, expected = "build_models", "a dict of the name of each engine and its torch.nn.Module"
    fix = 'return {"generator": ..., "discriminator": ...}'
    if not isinstance(value, dict) or not value:
        _refuse(trial, name, value, expected, fix)
    for key, each in value.items():
        if not isinstance(key, str) or not isinstance(each, torch.nn.Module):
            _refuse(trial, name, each, expected, fix, f"returned {key!r}: {described(each)}")
    return value


def layers(trial: Any, value: Any, num_stages: int, chunks: int = 1) -> list[Any]:
    """Check ``build_layers``: at least one layer for each of the ``chunks`` parts of each stage."""
    name, expected = "build_layers", "a list of layers: modules, functions, LayerSpec or TiedLayerSpec"
    lists = (torch.nn.Sequential, torch.nn.ModuleList)
    is_one = isinstance(value, torch.nn.Module) and not isinstance(value, lists)
    if is_one or not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
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
    message, fix = method_problem(value), f"use {', '.join(METHODS)} or e.g. type:Block"
    if not message and str(value).startswith(BY_TYPE):
        kinds = [getattr(layer, "typename", layer) for layer in layers]
        kinds = [type(kind) if isinstance(kind, torch.nn.Module) else kind for kind in kinds]
        names = dict.fromkeys(str(kind.__name__) for kind in kinds if hasattr(kind, "__name__"))
        pattern = str(value).removeprefix(BY_TYPE)
        if not any(re.search(pattern, name, re.IGNORECASE) for name in names):
            message = f"matches no layer: they are {', '.join(names) or 'functions without a name'}"
            guess = nearest(pattern, names)
            fix = f"{f'write type:{guess}' if guess else 'name one of them'}, or use {', '.join(METHODS)}"
    if message:
        is_stated = trial.resolved.strategy.partition_method is not None
        key = f"{'hyperparameters' if is_stated else type(trial).__name__}.partition_method"
        raise TrialError(Problem(key=key, value=value, message=message, fix=fix, code="partition-method"))
    return str(value)


def optimizer(trial: Any, model: torch.nn.Module, value: Any) -> torch.optim.Optimizer | None:
    """Check ``build_optimizer``, which was called with ``model``."""
    name, expected = "build_optimizer", "a torch.optim.Optimizer of the given model's parameters, or None"
    if value is None:
        return None
    if not isinstance(value, torch.optim.Optimizer):
        fix = "return torch.optim.AdamW(self.build_parameters(model), lr=...)"
        _refuse(trial, name, value, expected, fix)
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(each) in own for group in value.param_groups for each in group["params"]):
        did = f"returned {described(value)} that has no parameter of the model, so nothing would be trained"
        fix = "build it from the model that the method is given: self.build_parameters(model)"
        _refuse(trial, name, value, expected, fix, did)
    return value


def parameters(trial: Any, value: Any) -> list[Any]:
    """Check ``build_parameters``."""
    name = "build_parameters"
    expected = "a list of parameters, or of groups such as {'params': [...], 'weight_decay': 0.0}"
    if isinstance(value, (torch.Tensor, str, Mapping)) or not isinstance(value, Iterable):
        fix = "return [p for p in model.parameters() if p.requires_grad]"
        _refuse(trial, name, value, expected, fix)
    found = list(value)
    for each in found:
        if not isinstance(each, torch.Tensor) and not (isinstance(each, Mapping) and "params" in each):
            fix = "model.named_parameters() yields pairs: take the second of each"
            _refuse(trial, name, each, expected, fix, f"returned {described(each)} in a list")
    if not found and trial.is_whole:
        name = written_by_author(trial, name, "build_model")
        did = "returned no parameter that requires a gradient"
        fix = "give the model a parameter whose requires_grad is true"
        _refuse(trial, name, value, "at least one parameter", fix, did)
    return found


def groups(trial: Any, model: torch.nn.Module, optimizer: Any, parameters: Any) -> list[set[int]]:
    """The ids of the parameters in each group that the optimizer steps over; warn of those in none."""
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
        method = "build_parameters" if optimizer is None else "build_optimizer"
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        logger.warning(
            "warning: %s does not name %s%s, which require a gradient and are never trained; name them, or turn their "
            "requires_grad off in build_model",
            *(method_of(trial, method), ", ".join(missed[:3]), more),
        )
    return [group for group in found if group]


def engines(trial: Any, found: list[Any]) -> None:
    """Check that a trial has wrapped an engine."""
    if not found:
        has_own = hasattr(trial, "build_model")
        fix = "call super().__init__(context) first" if has_own else "call it on the engine"
        _refuse(trial, "__init__", None, "context.wrap_model_engine(engine)", fix, "wrapped no engine")


def loader(trial: Any, name: str, value: Any) -> Any:
    """Check ``build_training_data_loader`` or ``build_validation_data_loader``."""
    method = "training_loader" if "training" in name else "validation_loader"
    fix = (
        f"return self.{method}(dataset)"
        if hasattr(trial, method)
        else "return DataLoader(dataset, batch_size)"
    )
    not_loaders = (torch.utils.data.Dataset, torch.Tensor, type, bool, int, float, str)
    if value is None or isinstance(value, not_loaders):
        _refuse(trial, name, value, "a data loader", fix)
    return value


def loader_arguments(trial: Any, method: str, dataset: Any, options: Mapping[str, Any]) -> None:
    """Check the arguments of ``self.training_loader`` or ``self.validation_loader``: data, and no ``batch_size``."""
    name, message = trial.loader_names[method], ""
    try:
        has_index = hasattr(dataset, "__getitem__") and len(dataset) >= 0
    except TypeError:  # it has no length, such as a tensor of no dimension
        has_index = False
    if isinstance(dataset, type) or not (is_stream(dataset) or has_index):
        message = (
            f"got {described(dataset)}; expected data with __getitem__ and __len__, data that can be iterated, or a "
            "function that returns an iterator"
        )
        fix, code = f"{name}(dataset)", "loader-data"
    elif "batch_size" in options:
        size = trial.micro_batch_size
        message = f"got batch_size={options['batch_size']!r}; it is the micro-batch size, {size}"
        fix, code = (
            (
                f"leave batch_size out: {name}(dataset); its size is set by global_batch_size, or by "
                "train_micro_batch_size_per_gpu in the DeepSpeed JSON"
            ),
            "loader-batch-size",
        )
    if message:
        raise TrialError(Problem(key=name, message=message, fix=fix, code=code))


def callbacks(trial: Any, value: Any) -> dict[str, pytorch.PyTorchCallback]:
    """Check ``build_callbacks``; warn of methods that look like hooks."""
    name, expected = "build_callbacks", "a dict of names and PyTorchCallback objects"
    fix = 'return {"mine": MyCallback()}; the name is that of its state in a checkpoint'
    if not isinstance(value, dict):
        _refuse(trial, name, value, expected, fix)
    hooks = ["on_step_end", *(hook for hook in dir(pytorch.PyTorchCallback) if hook.startswith("on_"))]
    for key, callback in value.items():
        if not isinstance(key, str) or not isinstance(callback, pytorch.PyTorchCallback):
            _refuse(trial, name, callback, expected, fix, f"returned {key!r}: {described(callback)}")
        for method in dir(callback) if trial.context.distributed.rank == 0 else ():
            if method.startswith("on_") and method not in hooks:
                guess = nearest(method, hooks)
                logger.warning(
                    "warning: %s is not a hook of PyTorchCallback, and is never called%s",
                    *(method_of(callback, method), f"; did you mean {guess}?" if guess else ""),
                )
    return value


def tokens_per_sample(trial: Any, value: Any) -> float | None:
    """Check ``tokens_per_sample``."""
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0):
        fix = "return the tokens in a training sample, such as self.args.sequence_length, or None"
        _refuse(trial, "tokens_per_sample", value, "a number of at least 0, or None", fix)
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


def descended_before(trial: Any, error: RuntimeError) -> TrainingError | None:
    """The error for a loss whose ``backward`` the author has called, from torch's error in the second call."""
    if "backward through the graph a second time" not in str(error):
        return None
    did = "returned a loss whose backward() has been called, or that keeps the graph of a batch before"
    fix = "leave backward() and the optimizer's step to the library; detach() what is kept between batches"
    return failed(trial, "loss", None, SCALAR_LOSS, fix, did=did)


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
    is_scalar = isinstance(value, torch.Tensor) and not value.ndim
    if is_scalar and (value.requires_grad or not torch.is_grad_enabled()):
        return value
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
    expected = SCALAR_LOSS + (
        ", or a dict of metrics with 'loss'" if getattr(trial, "is_whole", True) else ""
    )
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
    name = written_by_author(trial, *names)
    if not isinstance(value, dict):
        fix = 'return {"name of a metric": value, ...}'
        raise failed(trial, name, value, "a dict of metrics by name", fix)
    for key in value:
        if not isinstance(key, str):
            did = f"returned a dict with the key {key!r}"
            raise failed(trial, name, value, "names of metrics as strings", f"write {str(key)!r}", did=did)
    return value


def batch_length(trial: Any, value: Any) -> int:
    """Check ``get_batch_length``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    fix = "return the number of samples in the batch, such as len(batch['labels'])"
    raise failed(trial, "get_batch_length", value, "an integer of at least 0", fix)
