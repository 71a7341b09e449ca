"""Corrections to an engine of deepspeed 0.19.8, and the numbers and messages that it keeps to itself."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import deepspeed.comm as comm
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import comms_logging
from deepspeed.utils.logging import print_dist

from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.trial.comms_logger import correct_comms_logger
from determined_ds.trial.expert_parallel import clip_by_all_experts, expert_layers
from determined_ds.trial.instruction_times import time_instructions
from determined_ds.trial.ordered_engine import PlannedEngine
from determined_ds.trial.step_timers import correct_timers
from determined_ds.trial.ulysses import add_up_slices

# Of this process, each while its trial holds it.
ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()


def fix_engine(engine: Any) -> None:
    """Correct what ``deepspeed.initialize`` returned; does nothing the second time, or with another kind of engine."""
    if not isinstance(engine, DeepSpeedEngine):
        return
    # It goes into every checkpoint, where torch would not load an AttrDict.
    engine.config = as_plain(engine.config)
    if isinstance(engine, PipelineEngine):
        _clip_by_all_stages(engine)
        _refuse_integers_between_stages(engine)
        time_instructions(engine)
    add_up_slices(engine)
    _let_gradients_through(engine)
    _keep_gradient_norm(engine)
    _scale_loss(engine)
    _print_what_is_configured(engine)


def is_fixed(engine: Any) -> bool:
    """Whether :func:`fix_engine` has seen an engine: ``ReconciledTrial.initialize`` calls it, before any wrapping."""
    return bool(getattr(engine, "_prints_what_is_configured", False))


def check_optimizer(optimizer: Any, ds_config: dict[str, Any]) -> None:
    """Refuse an optimizer from ``build_optimizer`` that ZeRO refuses.

    Args:
        optimizer: What ``build_optimizer`` returned.
        ds_config: What DeepSpeed is given.

    Raises:
        ConfigError: with what to write.

    Source: ``DeepSpeedEngine._configure_optimizer`` and ``_do_optimizer_sanity_check`` in
    ``deepspeed/runtime/engine.py``.
    """
    zero = ds_config.get("zero_optimization") or {}
    stage, kind = int(zero.get("stage") or 0), type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    device = (zero.get("offload_optimizer") or {}).get("device")
    untested = kind not in ZERO_SUPPORTED_OPTIMIZERS and kind.__name__ != "MuonWithAuxAdam"
    if stage and untested and not ds_config.get("zero_allow_untested_optimizer"):
        message = f"ZeRO stage {stage} does not take it"
        fix = 'return torch.optim.AdamW, or add "zero_allow_untested_optimizer": true to the DeepSpeed JSON'
    elif device in ("cpu", "nvme") and not isinstance(optimizer, (DeepSpeedCPUAdam, DeepSpeedCPULion)):
        if ds_config.get("zero_force_ds_cpu_optimizer", True) is False:
            return
        message = "an offloaded optimizer must be DeepSpeed's own"
        fix = (
            "return None, so that the one in the DeepSpeed JSON is used, or add"
            ' "zero_force_ds_cpu_optimizer": false to it'
        )
    else:
        return
    raise ConfigError(
        Problem(key="build_optimizer", value=name, message=message, fix=fix, code="zero-untested-optimizer")
    )


def check_sparse_gradients(model: torch.nn.Module, ds_config: dict[str, Any]) -> None:
    """Refuse embeddings with sparse gradients under ZeRO, which cannot divide them.

    Args:
        model: The bare model.
        ds_config: What DeepSpeed is given.

    Raises:
        ConfigError: with the name of the embedding.

    Source: deepspeed 0.19.8 ``split_half_float_double`` in ``runtime/zero/stage_1_and_2.py``; without ZeRO
    ``sparse_allreduce`` in ``runtime/engine.py`` gathers the rows that each rank has used.
    """
    stage = int((ds_config.get("zero_optimization") or {}).get("stage") or 0)
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if stage and sparse:
        problem = Problem(
            key="build_model",
            value=", ".join(sparse),
            message=f"has sparse gradients, and ZeRO stage {stage} takes dense ones only",
            fix="build the embedding with sparse=False, or set zero_optimization.stage to 0",
            code="zero-sparse-gradients",
        )
        raise ConfigError(problem)


def _clip_by_all_stages(engine: Any) -> None:
    """Have ``gradient_clipping`` use the gradient of the whole pipeline, not of its first stage.

    With neither ZeRO nor half precision, a parameter on another stage counts only if it is marked as one that no other
    rank holds.

    Source: ``clip_grad_norm_`` in ``deepspeed/runtime/utils.py``.
    """
    if engine.grid.get_slice_parallel_world_size() > 1:
        return  # the model marks which parameters its slices share
    for parameter in engine.module.parameters():
        # The copies of a tied weight are counted on one stage alone.
        parameter.model_parallel = not getattr(parameter, "ds_pipe_replicated", False)


def _refuse_integers_between_stages(engine: Any) -> None:
    """Refuse what a middle stage cannot receive, instead of training on numbers that were read as another type.

    A stage with neighbours on both sides receives activations and gradients in the same buffers, whose type is that of
    the first.

    Source: ``_allocate_or_extend_buffers`` in ``deepspeed/runtime/pipe/engine.py``.
    """
    if engine.num_stages <= 2 or isinstance(engine, PlannedEngine):
        return
    send = type(engine)._send_tensor_meta

    def send_tensor_meta(buffer: Any, recv_stage: int) -> None:
        tensors = buffer if isinstance(buffer, tuple) else (buffer,)
        dtypes = sorted({str(tensor.dtype) for tensor in tensors if not tensor.is_floating_point()})
        if dtypes:
            message = (
                f"stage {engine.stage_id} sends {', '.join(dtypes)}, and with three stages or more only floating point "
                "numbers arrive as they were sent"
            )
            fix = "make them on the stage that needs them, send them as floats, or use two stages"
            key, code = "hyperparameters.pipe_parallel_size", "pipeline-integers"
            raise ConfigError(Problem(key=key, value=engine.num_stages, message=message, fix=fix, code=code))
        send(engine, buffer, recv_stage)

    engine._send_tensor_meta = send_tensor_meta


def _let_gradients_through(engine: Any) -> None:
    """Let the backward pass of another engine go through this one, as a generator's goes through its discriminator.

    Without ZeRO, an engine refuses any backward pass that it did not begin itself. Its own gradients of that pass are
    not reduced over ranks, and are to be cleared before its next one: ``engine.zero_grad()``.

    Source: ``DeepSpeedEngine._backward_prologue`` in ``deepspeed/runtime/engine.py``.
    """
    if engine in ENGINES:
        return
    ENGINES.add(engine)
    prologue = engine._backward_prologue

    def backward_prologue() -> None:
        runs = [each for each in ENGINES if each._running_engine_backward]
        if engine._support_torch_style_backward or not runs or engine in runs:
            prologue()

    engine._backward_prologue = backward_prologue


def _keep_gradient_norm(engine: Any) -> None:
    """Keep the norm that clipping computes in fp32 without ZeRO, which the engine discards.

    Source: ``DeepSpeedEngine.clip_fp32_gradients`` in ``deepspeed/runtime/engine.py``.
    """

    has_experts = bool(expert_layers(engine.module))

    def clip_fp32_gradients() -> None:
        if has_experts:
            engine._global_grad_norm = clip_by_all_experts(engine.module, engine.gradient_clipping())
            return
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_fp32_gradients


def _scale_loss(engine: Any) -> None:
    """Scale the loss in fp16 without ZeRO: the engine divides the gradients by a scale that it never multiplied by.

    So small a gradient would vanish in Adam's ``eps``, hardly change weights by SGD, and never be clipped. The norm of
    the unfused optimizer is of scaled gradients, and is divided by their scale.

    Source: ``DeepSpeedEngine.backward`` in ``deepspeed/runtime/engine.py``, which scales for a ``ZeROOptimizer`` alone;
    ``unscale_and_clip_grads`` in ``deepspeed/runtime/fp16/unfused_optimizer.py``.
    """
    kinds, optimizer = (FP16_Optimizer, FP16_UnfusedOptimizer), engine.optimizer
    if not engine.fp16_enabled() or not isinstance(optimizer, kinds) or isinstance(engine, PipelineEngine):
        return
    kind, used = type(engine), 1.0

    def scaled(loss: Any) -> Any:
        nonlocal used
        used = float(engine._get_optimizer_loss_scale())
        return loss.float() * used

    def get_global_grad_norm() -> Any:
        norm = kind.get_global_grad_norm(engine)
        return None if norm is None else norm / used

    engine.backward = lambda loss, *args, **kwargs: (
        kind.backward(engine, scaled(loss), *args, **kwargs) / used
    )
    engine.scale = lambda loss: kind.scale(engine, scaled(loss))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        engine.get_global_grad_norm = get_global_grad_norm


def _print_what_is_configured(engine: Any) -> None:
    """Have rank 0 print what the DeepSpeed JSON asks for, which DeepSpeed 0.19.8 logs below the level that it shows.

    ``wall_clock_breakdown``, ``memory_breakdown`` and ``flops_profiler`` print by themselves.

    Source: ``_report_progress`` and ``__init__`` in ``runtime/engine.py``, ``ThroughputTimer`` in ``utils/timer.py``,
    ``CommsLogger.append`` in ``utils/comms_logging.py``; the logger's level is WARNING in ``utils/logging.py``.
    """
    if getattr(engine, "_prints_what_is_configured", False):
        return
    engine._prints_what_is_configured = True
    correct_timers(engine)
    correct_comms_logger()
    if engine.steps_per_print():
        engine._report_progress = functools.partial(_report_progress, engine)
        engine.tput_timer.logging = _print
    if engine.dump_state():
        lines = [f"  {name} {'.' * (29 - len(name))} {value}" for name, value in sorted(vars(engine).items())]
        _print("\n".join(["DeepSpeedEngine:", *lines]))
    if comms_logging.__dict__.get("log_dist") is not print_dist and comm.comms_logger.verbose:
        comms_logging.log_dist = print_dist


def _report_progress(engine: Any, step: int) -> None:
    _print(f"step={step}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={engine.get_mom()}")


def _print(message: str) -> None:
    print_dist(message, ranks=[0])


def print_communication() -> None:
    """The table of ``comms_logger`` at the end of training, where it is enabled; a collective then."""
    if comm.comms_logger.enabled and getattr(comm.comms_logger, "prints", True):
        comm.log_summary()
