"""Muon's functions are compiled when they are called: a start of every other optimizer need not wait for a compiler.

Whatever the optimizer, ZeRO of deepspeed 0.19.8 loads ``deepspeed/runtime/zero/muon/original_muon.py``, whose functions
are decorated with ``torch.compile``. That compiles nothing yet, but loads torch's code generator: three of the eleven
seconds that a short run took from its start to its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def compile_muon_when_called() -> None:
    """Load Muon without the code generator; again, this changes nothing."""
    from deepspeed.runtime import compiler

    own = compiler.compile
    compiler.compile = lambda: compiled_when_called
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = own


def compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """As the decorator ``torch.compile``, which is asked at the first call."""
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if torch.compiler.is_compiling():  # it is part of another that is compiled
            return function(*args, **kwargs)
        compiled = compiled or torch.compile(function)
        return compiled(*args, **kwargs)

    return call
