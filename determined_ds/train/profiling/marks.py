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

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.profiler import record_function

from determined_ds.rundir.profile_files import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    MODULE,
    OPTIMIZER,
    PIPELINE,
)
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
MISSING: Any = object()


@contextlib.contextmanager
def marked(
    engines: Sequence[Any], *, models: Sequence[torch.nn.Module] = (), mover: Any = None
) -> Iterator[None]:
    """Put the ranges of :mod:`~determined_ds.rundir.profile_files` around what is called in this block.

    Args:
        engines: Those that train, where they are known: their modules are named, and pipelines' instructions marked.
        models: Modules whose forward pass is that of the step, where no engine is known.
        mover: What moves batches to the device, by its ``move``; None: unknown.
    """
    with contextlib.ExitStack() as stack:
        for kind in (DeepSpeedEngine, DDPEngine):
            for name, mark in METHODS.items():
                stack.enter_context(_ranged(kind, name, mark))
        stack.enter_context(_ranged(torch.autograd, "backward", BACKWARD))
        if mover is not None:
            stack.enter_context(_ranged(mover, "move", DATA))
        for engine in engines:
            if isinstance(engine, PipelineEngine):
                stack.enter_context(_instructions(engine))
                if engine.num_stages > 1:  # the loss of a batch is known once the last stage is done
                    stack.enter_context(_ranged(engine, "_aggregate_total_loss", PIPELINE))
            stack.enter_context(_modules(engine.module))
        for model in models:
            stack.enter_context(_modules(model, root=FORWARD))
        yield


@contextlib.contextmanager
def _ranged(owner: Any, name: str, mark: str) -> Iterator[None]:
    """Put a range around a function of a module, of a class, or of one object."""
    own = vars(owner).get(name, MISSING)
    setattr(owner, name, _within(getattr(owner, name) if own is MISSING else own, mark))
    try:
        yield
    finally:
        delattr(owner, name) if own is MISSING else setattr(owner, name, own)


def _within(function: Callable[..., Any], mark: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(mark):
            return function(*args, **kwargs)

    return ranged


@contextlib.contextmanager
def _instructions(engine: PipelineEngine) -> Iterator[None]:
    """Put ranges around the instructions of a pipeline's schedule."""
    own = vars(engine).get("_INSTRUCTION_MAP", MISSING)
    engine._INSTRUCTION_MAP = {
        kind: _within(instruction, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else instruction
        for kind, instruction in engine._INSTRUCTION_MAP.items()
    }
    try:
        yield
    finally:
        if own is MISSING:
            del engine._INSTRUCTION_MAP
        else:
            engine._INSTRUCTION_MAP = own


@contextlib.contextmanager
def _modules(model: torch.nn.Module, root: str = "") -> Iterator[None]:
    """Put a range with its name around the forward pass of each module.

    Not where a part is compiled: a new hook would have it compiled anew.

    Args:
        model: The model.
        root: The range around the model itself; "": none.
    """
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        yield
        return
    open_ranges: list[tuple[torch.nn.Module, Any]] = []

    def begin(mark: str, module: torch.nn.Module, _: Any) -> None:
        found = record_function(mark)
        found.__enter__()
        open_ranges.append((module, found))

    def end(module: torch.nn.Module, *_: Any) -> None:
        # A forward pass that is recomputed may end early, by an error that leaves inner modules open.
        while any(each is module for each, _ in open_ranges):
            inner, found = open_ranges.pop()
            found.__exit__(None, None, None)
            if inner is module:
                return

    handles = []
    for name, module in model.named_modules():
        mark = MODULE + name if name else root
        if mark and not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(functools.partial(begin, mark), prepend=True))
            handles.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_ranges:
            open_ranges.pop()[1].__exit__(None, None, None)
