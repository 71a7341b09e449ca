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

from determined_ds.profile.record import (
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
def marked(engines: Sequence[Any], *, mover: Any = None) -> Iterator[None]:
    """Put the ranges of :mod:`~determined_ds.profile.record` around what is called in this block.

    Args:
        engines: Those that train: their modules are named, and pipelines' instructions marked.
        mover: What moves batches to the device, by its ``move``; None: unknown.
    """
    with contextlib.ExitStack() as stack:

        def ranged(owner: Any, name: str, mark: str) -> None:
            stack.enter_context(_replaced(owner, name, lambda function: _within(function, mark)))

        for kind in (DeepSpeedEngine, DDPEngine):
            for name, mark in METHODS.items():
                ranged(kind, name, mark)
        ranged(torch.autograd, "backward", BACKWARD)
        if mover is not None:
            ranged(mover, "move", DATA)
        for engine in engines:
            if isinstance(engine, PipelineEngine):
                stack.enter_context(_replaced(engine, "_INSTRUCTION_MAP", _marked_instructions))
                if engine.num_stages > 1:  # the loss of a batch is known once the last stage is done
                    ranged(engine, "_aggregate_total_loss", PIPELINE)
            stack.enter_context(_modules(engine.module))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a module, of a class, or of one object, by what is made of it."""
    own = vars(owner).get(name, MISSING)
    setattr(owner, name, replacement(getattr(owner, name) if own is MISSING else own))
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


def _marked_instructions(own: dict[Any, Any]) -> dict[Any, Any]:
    return {
        kind: _within(run, INSTRUCTIONS[kind]) if kind in INSTRUCTIONS else run for kind, run in own.items()
    }


@contextlib.contextmanager
def _modules(model: torch.nn.Module) -> Iterator[None]:
    """Put a range with its name around the forward pass of each module.

    Not where a part is compiled: a new hook would have it compiled anew.
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
        if name and not isinstance(module, torch.jit.ScriptModule):
            hook = functools.partial(begin, MODULE + name)
            handles.append(module.register_forward_pre_hook(hook, prepend=True))
            handles.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while open_ranges:
            open_ranges.pop()[1].__exit__(None, None, None)
