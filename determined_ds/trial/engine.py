"""What an engine of deepspeed 0.19.8 gets wrong or keeps to itself, put right on the engine at hand."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_

from determined_ds.errors import ConfigError, Problem
from determined_ds.trial.instruction_times import time_instructions


def mend_engine(engine: Any) -> None:
    """Put an engine right; again, on one that is, changes nothing.

    Args:
        engine: What ``deepspeed.initialize`` returned. Any other engine is left as it is.
    """
    if not isinstance(engine, DeepSpeedEngine):
        return
    if isinstance(engine, PipelineEngine):
        _clip_by_all_stages(engine)
        _refuse_integers_between_stages(engine)
        time_instructions(engine)
    _keep_gradient_norm(engine)


def _clip_by_all_stages(engine: Any) -> None:
    """Have ``gradient_clipping`` go by the gradient of the whole pipeline, not by its first stage's.

    Where there is neither ZeRO nor half precision, a parameter on another stage counts only if it is marked as
    one that no other rank holds.

    Source: ``clip_grad_norm_`` in ``deepspeed/runtime/utils.py``.
    """
    if engine.grid.get_slice_parallel_world_size() > 1:
        return  # then it is for the model to say which parameters its slices share
    for parameter in engine.module.parameters():
        # The copies of a tied weight are counted on one stage alone.
        parameter.model_parallel = not getattr(parameter, "ds_pipe_replicated", False)


def _refuse_integers_between_stages(engine: Any) -> None:
    """Refuse what a middle stage cannot receive, instead of training on numbers that were read as another type.

    A stage with neighbours on both sides receives activations and gradients in the same buffers, which are made
    of the type that comes first.

    Source: ``_allocate_or_extend_buffers`` in ``deepspeed/runtime/pipe/engine.py``.
    """
    if engine.num_stages <= 2:
        return
    send = type(engine)._send_tensor_meta

    def send_tensor_meta(buffer: Any, recv_stage: int) -> None:
        tensors = buffer if isinstance(buffer, tuple) else (buffer,)
        dtypes = sorted({str(tensor.dtype) for tensor in tensors if not tensor.is_floating_point()})
        if dtypes:
            raise ConfigError(
                Problem(
                    key="hyperparameters.pipe_parallel_size",
                    value=engine.num_stages,
                    message=f"stage {engine.stage_id} hands on {', '.join(dtypes)}, and with three stages or more"
                    " only floating point numbers arrive as they were sent",
                    mend="make them on the stage that needs them, hand them on as floats, or use two stages",
                    code="pipeline-integers",
                )
            )
        send(engine, buffer, recv_stage)

    engine._send_tensor_meta = send_tensor_meta


def _keep_gradient_norm(engine: Any) -> None:
    """Keep the norm that clipping computes in fp32 without ZeRO, where the engine throws it away.

    Source: ``DeepSpeedEngine.clip_fp32_gradients`` in ``deepspeed/runtime/engine.py``.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_fp32_gradients
