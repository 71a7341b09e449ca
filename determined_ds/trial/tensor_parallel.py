"""Tensor parallel training by DeepSpeed's AutoTP: what it needs around ``deepspeed.initialize``.

1. ``model_parallel_size`` ranks make a group, which holds one copy of the model and reads the same batches.
2. DeepSpeed replaces the model's linear layers by parts of them; norms and embeddings stay whole on each rank.
3. A model that it cannot cut is refused with what to do instead.
4. The first rank of a group reports metrics: the others computed the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups
from determined.pytorch import deepspeed as det_ds

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, Problem

KEY, SIZE = "tensor_parallel", "hyperparameters.model_parallel_size"
FAMILIES = "llama, mistral, qwen2, qwen3, gemma, gpt_neox, opt or gpt_bigcode"
LAYER_SPECS = "tensor_parallel.partition_config.layer_specs"


def degree_in(ds_config: Mapping[str, Any]) -> int:
    """Ranks that share a layer by AutoTP; 1: none."""
    return max(1, int((ds_config.get(KEY) or {}).get("autotp_size") or 0))


def degree_of(engine: Any) -> int:
    """The same of an engine."""
    size = getattr(engine, "autotp_size", None)
    return max(1, int(size() or 0)) if callable(size) else 1


def decided(context: Any, resolved: ResolvedConfig) -> ResolvedConfig:
    """The configuration that has AutoTP do what ``model_parallel_size`` asks for, if the JSON does not say how.

    A collective where it changes: the file of what DeepSpeed is given is written again.
    """
    found = resolved.with_tensor_parallel()
    decide = getattr(context, "_decide", None)
    if found is not resolved and decide is not None:
        decide(found)
    return found


def groups_of(degree: int) -> Any:
    """The model-parallel unit for ``deepspeed.initialize``; None without tensor parallel. A collective.

    With it DeepSpeed counts replicas for its batch sizes; without it, ranks.

    Raises:
        ConfigError: an earlier engine of this process has another degree.

    Source: ``DeepSpeedConfig.__init__`` in ``runtime/config.py``, ``_init_tp_mesh_device`` in ``utils/groups.py``
    (deepspeed 0.19.8).
    """
    if degree == 1:
        return None
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    made = groups.get_tensor_model_parallel_world_size()
    if made != degree:
        message = f"this process has groups of {made} ranks already, and DeepSpeed makes them once"
        fix = "start a process for each degree"
        raise ConfigError(Problem(key=SIZE, value=degree, message=message, fix=fix, code=KEY))
    return groups


@contextlib.contextmanager
def carried_out(model: torch.nn.Module, ds_config: Mapping[str, Any]) -> Iterator[Any]:
    """Around ``deepspeed.initialize``, which cuts the model as its configuration says; a collective.

    Yields:
        The ``mpu`` for it; None without tensor parallel.

    Raises:
        ConfigError: DeepSpeed cannot cut the model, or it would train on other numbers.
    """
    degree = degree_in(ds_config)
    mpu = groups_of(degree)
    if mpu is None:
        yield None
        return
    _check_kind(model, degree)
    try:
        yield mpu
    except (AssertionError, ValueError, NotImplementedError) as error:
        if not _is_of_autotp(error):
            raise
        fix = f"say which layers are cut, by {LAYER_SPECS}; or use a model of the type {FAMILIES}"
        raise _problem(model, degree, f"DeepSpeed cannot cut it: {error}", fix) from error
    _check_cut(model, degree)


def _check_kind(model: torch.nn.Module, degree: int) -> None:
    """GPT-2's ``Conv1D`` holds weights the other way round, which AutoTP would cut in the wrong direction.

    Source: ``AutoTP.supported`` and ``_replace`` (which drops its ``conv_LinearLayer``) in
    ``module_inject/auto_tp.py`` (deepspeed 0.19.8).
    """
    refuse_adapters(model, SIZE, degree)
    kinds = {type(module).__name__ for module in model.modules()}
    if "Conv1D" in kinds:
        message = "its matrices are Conv1D, which hold the transposed weights: DeepSpeed cuts nn.Linear alone"
        fix = "use a model of nn.Linear, such as model_type gpt_neox (experiments/gpt2/tensor_parallel.yaml)"
        raise _problem(model, degree, message, fix)


def refuse_adapters(model: torch.nn.Module, key: str, degree: int) -> None:
    """Refuse adapters of ``peft``: DeepSpeed would put its own layers in the place of theirs, without them.

    Raises:
        ConfigError: the model has some.

    Source: ``_replace_module`` in deepspeed 0.19.8's ``module_inject/auto_tp.py``.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        message = f"{type(model).__name__}: DeepSpeed would replace its adapters by layers without them"
        fix = "train all of it (lora: null), or share no layers or experts"
        raise ConfigError(Problem(key=key, value=degree, message=message, fix=fix, code=KEY))


def _is_of_autotp(error: BaseException) -> bool:
    """Whether an error was raised where DeepSpeed cuts the model."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_apply_autotp_partitioning":
            return True
        trace = trace.tb_next
    return False


def _check_cut(model: torch.nn.Module, degree: int) -> None:
    """Check a model that DeepSpeed has cut.

    Raises:
        ConfigError: no layer was cut; or the ranks would draw different dropout for activations that they share.
    """
    cut = [module for module in model.modules() if isinstance(module, TensorParallel_Layer)]
    if not cut:
        message = "none of its layers was cut, so all ranks would compute the same"
        fix = f"say which layers are cut, by {LAYER_SPECS}; or use a model of the type {FAMILIES}"
        raise _problem(model, degree, message, fix)
    uneven = [module for module in cut if len(set(getattr(module, "_partition_sizes", None) or ())) > 1]
    if uneven and draws_dropout(model):
        sizes = " and ".join(str(size) for size in uneven[0]._partition_sizes)
        message = (
            f"{uneven[0].name} is cut into {sizes}, so the ranks would draw different numbers of random numbers, "
            "and then different dropout for the activations that they share"
        )
        fix = "use a model_parallel_size that divides its heads and widths, or train without dropout"
        raise _problem(model, degree, message, fix)


def draws_dropout(model: torch.nn.Module) -> bool:
    """Whether any part of a model drops activations."""
    layers = any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules())
    config = getattr(model, "config", None)
    settings = vars(config).items() if config is not None else ()
    names = [
        name for name, value in settings if ("dropout" in name or "pdrop" in name) and _is_positive(value)
    ]
    return layers or bool(names)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _problem(model: torch.nn.Module, degree: int, message: str, fix: str) -> ConfigError:
    words = f"{type(model).__name__}: {message}"
    return ConfigError(Problem(key=SIZE, value=degree, message=words, fix=fix, code=KEY))


def unit_of(engine: Any) -> det_ds.ModelParallelUnit:
    """Determined's unit of a tensor-parallel engine: which replica this rank is of, and whether it reports."""
    mpu = engine.mpu
    return det_ds.ModelParallelUnit(
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_world_size=mpu.get_data_parallel_world_size(),
        should_report_metrics=mpu.get_tensor_model_parallel_rank() == 0,
        should_build_data_loader=True,
    )


def is_copy(engine: Any) -> bool:
    """Whether another rank of a tensor-parallel group computes the same losses, and counts in metrics."""
    return degree_of(engine) > 1 and dist.get_rank(group=groups.get_tensor_model_parallel_group()) > 0
