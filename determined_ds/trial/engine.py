"""What an engine of deepspeed 0.19.8 gets wrong or keeps to itself, put right on the engine at hand."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_


def mend_engine(engine: Any) -> None:
    """Put an engine right; again, on one that is, changes nothing.

    Args:
        engine: What ``deepspeed.initialize`` returned.
    """
    if isinstance(engine, PipelineEngine):
        _clip_by_all_stages(engine)
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


def _keep_gradient_norm(engine: Any) -> None:
    """Keep the norm that clipping computes in fp32 without ZeRO, where the engine throws it away.

    Source: ``DeepSpeedEngine.clip_fp32_gradients`` in ``deepspeed/runtime/engine.py``.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip_grad_norm_(
            parameters=engine.module.parameters(), max_norm=engine.gradient_clipping(), mpu=engine.mpu
        )

    engine.clip_fp32_gradients = clip_fp32_gradients
