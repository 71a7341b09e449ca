"""Corrections to an engine of deepspeed 0.19.8 that change its numbers."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_

from determined_ds.documents.text import as_plain
from determined_ds.trial.author import refused
from determined_ds.trial.expert_parallel import clip_by_all_experts, expert_layers
from determined_ds.trial.instruction_times import time_instructions
from determined_ds.trial.patched import check_upstream
from determined_ds.trial.pipeline_engine import PlannedEngine
from determined_ds.trial.timers import correct_timers
from determined_ds.trial.ulysses import add_up_slices

# Of this process, each while its trial holds it.
ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()


def fix_engine(engine: Any) -> None:
    """Correct what ``deepspeed.initialize`` returned; does nothing the second time, or with another kind of engine.

    Raises:
        ConfigError: this DeepSpeed has other names than those that are corrected.
    """
    if not isinstance(engine, DeepSpeedEngine) or is_fixed(engine):
        return
    check_upstream()
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
    correct_timers(engine)
    ENGINES.add(engine)


def is_fixed(engine: Any) -> bool:
    """Whether :func:`fix_engine` has seen an engine: ``ReconciledTrial.initialize`` calls it, before any wrapping."""
    return engine in ENGINES


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
        if dtypes := sorted({str(tensor.dtype) for tensor in tensors if not tensor.is_floating_point()}):
            message = (
                f"stage {engine.stage_id} sends {', '.join(dtypes)}; through a middle stage only floats pass"
            )
            fix = "make them on the stage that needs them, send them as floats, or use two stages"
            key, code = "hyperparameters.pipe_parallel_size", "pipeline-integers"
            raise refused(key, message, fix, code, value=engine.num_stages)
        send(engine, buffer, recv_stage)

    engine._send_tensor_meta = send_tensor_meta


def _let_gradients_through(engine: Any) -> None:
    """Let the backward pass of another engine go through this one, as a generator's goes through its discriminator.

    Without ZeRO, an engine refuses any backward pass that it did not begin itself. Its own gradients of that pass are
    not reduced over ranks, and are to be cleared before its next one: ``engine.zero_grad()``.

    Source: ``DeepSpeedEngine._backward_prologue`` in ``deepspeed/runtime/engine.py``.
    """
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
        parameters, limit = list(engine.module.parameters()), engine.gradient_clipping()
        engine._global_grad_norm = (
            clip_by_all_experts(parameters, limit)
            if has_experts
            else clip_grad_norm_(parameters, max_norm=limit, mpu=engine.mpu)
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

    def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.backward(engine, scaled(loss), *args, **kwargs) / used

    def get_global_grad_norm() -> Any:
        norm = kind.get_global_grad_norm(engine)
        return None if norm is None else norm / used

    engine.backward = backward
    engine.scale = lambda loss: kind.scale(engine, scaled(loss))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        engine.get_global_grad_norm = get_global_grad_norm
