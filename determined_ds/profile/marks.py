"""Ranges of ours in a trace: what the host is at, while steps are recorded.

They are put around methods of DeepSpeed's engines and of torch, and taken away afterwards.

Source: ``DeepSpeedEngine`` in deepspeed 0.19.8's ``runtime/engine.py``, ``PipelineEngine._INSTRUCTION_MAP`` in
``runtime/pipe/engine.py``; ``Tensor.backward`` in torch 2.13's ``_tensor.py``, which calls ``torch.autograd.backward``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.profiler import record_function

from determined_ds.profile.record import RANGE
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.pipeline_engine import AwaitMessage, InputPass, WeightPass

METHODS = {"forward": "forward", "backward": "backward", "step": "optimizer"}
INSTRUCTIONS = {
    schedule.LoadMicroBatch: "data",
    schedule.ForwardPass: "forward",
    schedule.BackwardPass: "backward",
    schedule.OptimizerStep: "optimizer",
    schedule.ReduceGrads: "communication",
    schedule.ReduceTiedGrads: "communication",
    schedule.SendActivation: "pipeline",
    schedule.RecvActivation: "pipeline",
    schedule.SendGrad: "pipeline",
    schedule.RecvGrad: "pipeline",
    InputPass: "backward",
    WeightPass: "backward",
    AwaitMessage: "pipeline",
}


@contextlib.contextmanager
def marked(engines: Sequence[Any], *, mover: Any) -> Iterator[None]:
    """Put the ranges of :mod:`~determined_ds.profile.record` around what is called in this block.

    Args:
        engines: Those that train; pipelines' instructions are marked.
        mover: What moves batches to the device, by its ``move``.
    """

    def within(function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with record_function(RANGE + phase):
                return function(*args, **kwargs)

        return ranged

    replaced = [
        (kind, name, phase) for kind in (DeepSpeedEngine, DDPEngine) for name, phase in METHODS.items()
    ]
    replaced += [(torch.autograd, "backward", "backward"), (mover, "move", "data")]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            if not isinstance(engine, PipelineEngine):
                continue
            if engine.num_stages > 1:  # the loss of a batch is known once the last stage is done
                replaced.append((engine, "_aggregate_total_loss", "pipeline"))
            carried_out = {
                kind: within(run, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else run
                for kind, run in engine._INSTRUCTION_MAP.items()
            }
            stack.enter_context(mock.patch.object(engine, "_INSTRUCTION_MAP", carried_out))
        for owner, name, phase in replaced:
            stack.enter_context(mock.patch.object(owner, name, within(getattr(owner, name), phase)))
        yield
