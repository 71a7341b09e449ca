"""``torch_compile: true``: an engine's model compiled by torch, on a machine that can."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import ConfigError, Problem


def compile_engine(engine: Any, device: torch.device) -> None:
    """Have an engine compile its model: at its first forward pass, which then takes seconds to minutes.

    A pipeline compiles layer by layer. ZeRO stage 3 takes parameters away between layers, which cuts the model into
    pieces: it runs, takes longest to compile, and gains little.

    Args:
        engine: DeepSpeed's, or ours by torch alone.
        device: What the model computes on.

    Raises:
        ConfigError: there is no compiler here; torch itself finds that out in the first step.

    Source: ``DeepSpeedEngine.compile`` and ``PipelineModule.compile`` in deepspeed 0.19.8.
    """
    missing = missing_tools(device)
    if missing:
        raise ConfigError(
            Problem(
                key="hyperparameters.torch_compile",
                value=True,
                message=f"torch.compile writes code and compiles it here, and there is no {' and no '.join(missing)}",
                fix="install it (Debian and Ubuntu: apt install g++ python3-dev); or torch_compile: false",
                code="torch-compile",
            )
        )
    for module in (engine.module, *getattr(engine.module, "forward_funcs", ())):
        _give_own_frame(module)
    engine.compile()


def missing_tools(device: torch.device) -> list[str]:
    """What torch.compile needs and does not find on this machine, in words.

    Args:
        device: On a CPU, torch writes C++; on CUDA, for Triton, whose kernels are started from C.

    Source: ``config.cpp.cxx`` in torch 2.13's ``_inductor/config.py``; ``_build`` in triton 3's ``runtime/build.py``.
    """
    missing = []
    if device.type == "cuda":
        if not torch.utils._triton.has_triton_package():
            missing.append("Triton (the package triton)")
        named = os.environ.get("CC")
        kind, names = "C compiler", [named] if named else ["gcc", "clang"]
    else:
        from torch._inductor import config

        kind, names = "C++ compiler", [name for name in config.cpp.cxx if name]
    if not any(shutil.which(name) for name in names):
        missing.append(f"{kind} ({' or '.join(names)})")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python.h, the headers of this Python")
    return missing


def _give_own_frame(module: Any) -> None:
    """Have a module that is torch's own, such as ``Sequential``, compiled and not left as it is without a word.

    torch compiles functions as Python comes to run them, and passes over those of its own files; what they call of
    the model's is compiled, each by itself. Where all that a model calls is torch's own, that is nothing. A function
    of ours around it is compiled with all that is in it.

    Source: ``torch.nn.Module.compile``, and ``_TorchDynamoContext.__call__`` in torch 2.13's ``_dynamo/eval_frame.py``.
    """
    if not isinstance(module, torch.nn.Module) or "forward" in vars(module):
        return
    if type(module).forward.__module__.startswith("torch."):
        module.forward = _in_own_frame(module.forward)


def _in_own_frame(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*inputs: Any, **kwargs: Any) -> Any:
        return forward(*inputs, **kwargs)

    return run
