"""Ranges of ours in a trace: what the host is at, while steps are recorded.

They are put around methods of DeepSpeed's engines and of torch, and taken away afterwards, so that a training that is
not recorded runs the code that it always does. Nothing is computed by them.

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

from determined_ds.profile.record import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, PIPELINE
from determined_ds.trial.ddp import DDPEngine
from determined_ds.trial.pipeline_engine import AwaitMessage, InputPass, WeightPass

METHODS = {"forward": FORWARD, "backward": BACKWARD, "step": OPTIMIZER}
INSTRUCTIONS = {
    schedule.LoadMicroBatch: DATA,
    schedule.ForwardPass: FORWARD,
    schedule.BackwardPass: BACKWARD,
    schedule.OptimizerStep: OPTIMIZER,
    schedule.ReduceGrads: COMMUNICATION,
    schedule.ReduceTiedGrads: COMMUNICATION,
    schedule.SendActivation: PIPELINE,
    schedule.RecvActivation: PIPELINE,
    schedule.SendGrad: PIPELINE,
    schedule.RecvGrad: PIPELINE,
    InputPass: BACKWARD,
    WeightPass: BACKWARD,
    AwaitMessage: PIPELINE,
}


@contextlib.contextmanager
def marked(engines: Sequence[Any], *, mover: Any) -> Iterator[None]:
    """Put the ranges of :mod:`~determined_ds.profile.record` around what is called in this block.

    Args:
        engines: Those that train; pipelines' instructions are marked.
        mover: What moves batches to the device, by its ``move``.
    """
    replaced = [(kind, name, mark) for kind in (DeepSpeedEngine, DDPEngine) for name, mark in METHODS.items()]
    replaced += [(torch.autograd, "backward", BACKWARD), (mover, "move", DATA)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            if not isinstance(engine, PipelineEngine):
                continue
            if engine.num_stages > 1:  # the loss of a batch is known once the last stage is done
                replaced.append((engine, "_aggregate_total_loss", PIPELINE))
            own = engine._INSTRUCTION_MAP
            within = {
                kind: _within(run, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else run
                for kind, run in own.items()
            }
            stack.enter_context(mock.patch.object(engine, "_INSTRUCTION_MAP", within))
        for owner, name, mark in replaced:
            stack.enter_context(mock.patch.object(owner, name, _within(getattr(owner, name), mark)))
        yield


def _within(function: Callable[..., Any], mark: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return function(*args, **kwargs)

    return ranged
