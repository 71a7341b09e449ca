"""Tensor parallel training by DeepSpeed's AutoTP: what it needs around ``deepspeed.initialize``.

``model_parallel_size`` ranks make a group, which holds one copy of the model and reads the same batches; its first rank
reports. DeepSpeed replaces the linear layers by parts of them; norms and embeddings stay whole on each rank.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups

from determined_ds.config.strategy import autotp_degree
from determined_ds.errors import ConfigError
from determined_ds.trial.author import refused

KEY, SIZE = "tensor_parallel", "hyperparameters.model_parallel_size"
FAMILIES = "llama, mistral, qwen2, qwen3, gemma, gpt_neox, opt or gpt_bigcode"
SAY_WHICH = (
    f"name them in tensor_parallel.partition_config.layer_specs; or use a model of the type {FAMILIES}"
)


def degree_of(engine: Any) -> int:
    """Ranks that share a layer of an engine by AutoTP; 1: none."""
    size = getattr(engine, "autotp_size", None)
    return max(1, int(size() or 0)) if callable(size) else 1


@contextlib.contextmanager
def carried_out(model: torch.nn.Module, ds_config: Mapping[str, Any]) -> Iterator[Any]:
    """Around ``deepspeed.initialize``, which cuts the model as its configuration says; a collective.

    It yields the model-parallel unit for it, by which DeepSpeed counts replicas; None without tensor parallel. Refused
    is a model that DeepSpeed cannot cut or would train on other numbers, and another degree than an earlier engine's.

    Source: ``DeepSpeedConfig.__init__`` in ``runtime/config.py``, ``_init_tp_mesh_device`` in ``utils/groups.py``;
    ``AutoTP.supported`` and ``_replace`` (which drops its ``conv_LinearLayer``) in ``module_inject/auto_tp.py``
    (deepspeed 0.19.8).
    """
    degree = autotp_degree(ds_config)
    if degree == 1:
        yield None
        return
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    if (made := groups.get_tensor_model_parallel_world_size()) != degree:
        message = f"this process has groups of {made} ranks already, and DeepSpeed makes them once"
        raise refused(SIZE, message, "start a process for each degree", KEY, value=degree)
    refuse_adapters(model, SIZE, degree)
    if "Conv1D" in {type(module).__name__ for module in model.modules()}:
        message = "its matrices are Conv1D, which hold the transposed weights: DeepSpeed cuts nn.Linear alone"
        fix = "use a model of nn.Linear, such as model_type llama (experiments/causal_lm/const.yaml)"
        raise undivided(model, SIZE, degree, message, fix)
    # Of DeepSpeed's own specs for a family several match each layer, and the first is meant: it warns 32 times.
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(_is_news)
    try:
        with explained(model, SIZE, degree, "_apply_autotp_partitioning", SAY_WHICH):
            yield groups
    finally:
        logger.removeFilter(_is_news)
    cut = [module for module in model.modules() if isinstance(module, TensorParallel_Layer)]
    if not cut:
        message = "none of its layers was cut, so all ranks would compute the same"
        raise undivided(model, SIZE, degree, message, SAY_WHICH)
    uneven = [module for module in cut if len(set(getattr(module, "_partition_sizes", None) or ())) > 1]
    if uneven and draws_dropout(model):
        message = (
            f"{uneven[0].name} is cut unevenly, so the ranks would draw different dropout for what they share"
        )
        fix = "use a model_parallel_size that divides its heads and widths, or train without dropout"
        raise undivided(model, SIZE, degree, message, fix)


def _is_news(record: logging.LogRecord) -> bool:
    return "matched multiple layer_specs" not in record.getMessage()


def refuse_adapters(model: torch.nn.Module, key: str, degree: int) -> None:
    """Refuse adapters of ``peft``: DeepSpeed would put its own layers in the place of theirs, without them.

    Source: ``_replace_module`` in deepspeed 0.19.8's ``module_inject/auto_tp.py``.
    """
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        message = "DeepSpeed would replace its adapters by layers without them"
        fix = "train all of it (lora: null), or share no layers or experts"
        raise undivided(model, key, degree, message, fix)


def undivided(model: torch.nn.Module, key: str, degree: int, message: str, fix: str) -> ConfigError:
    """The error of a model that DeepSpeed cannot divide among ``degree`` ranks."""
    return refused(key, f"{type(model).__name__}: {message}", fix, "undivided", value=degree)


@contextlib.contextmanager
def explained(model: torch.nn.Module, key: str, degree: int, function: str, fix: str) -> Iterator[None]:
    """Turn what a function of DeepSpeed's raises, or what it calls, into such an error."""
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        if not any(frame.f_code.co_name == function for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        raise undivided(model, key, degree, f"DeepSpeed cannot cut it: {error}", fix) from error


def draws_dropout(model: torch.nn.Module) -> bool:
    """Whether any part of a model drops activations."""
    settings = vars(getattr(model, "config", None) or object).items()
    return any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules()) or any(
        ("dropout" in name or "pdrop" in name) and isinstance(value, (int, float)) and value > 0
        for name, value in settings
    )


def is_copy(engine: Any) -> bool:
    """Whether another rank of a tensor-parallel group computes the same losses, and counts in metrics."""
    return degree_of(engine) > 1 and dist.get_rank(group=groups.get_tensor_model_parallel_group()) > 0
