"""Calls in the user's code that may wait, as ranges of a trace with their file and line.

``.item()`` and its like wait for the GPU; a collective waits for the other ranks. DeepSpeed's and this library's own
calls are left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from determined_ds.protocol.profile_files import WAIT

# Of a tensor, what copies it to the host.
TENSOR_CALLS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
# As code objects name them: not resolved, where an environment is a link.
PACKAGE = str(Path(__file__).parents[2]) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
# Functions around every collective.
WRAPPERS = ("wrapper", "log_wrapper", "inner", "decorate_context")
# Frames between a call and the code that it is in.
PASSED_THROUGH = (TORCH, f"{os.sep}deepspeed{os.sep}comm{os.sep}")


@contextlib.contextmanager
def marked_waiting_calls() -> Iterator[None]:
    """Within it, calls of the user's code that may wait are ranges of the trace."""
    places: list[tuple[Any, str]] = [(torch.Tensor, name) for name in TENSOR_CALLS]
    places += [(torch.cuda, "synchronize")]
    if dist.is_available():
        places += [(dist.Work, "wait")]  # what every collective ends with, synchronous ones too
    with contextlib.ExitStack() as replaced:
        for owner, name in places:
            replaced.callback(_replace(owner, name))
        yield


def _replace(owner: Any, name: str) -> Callable[[], None]:
    original, is_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        place = _place(name)
        if place is None:
            return original(*args, **kwargs)
        with record_function(f"{WAIT}{place}"):
            return original(*args, **kwargs)

    setattr(owner, name, marked)
    # What a class inherits must not become its own.
    return functools.partial(setattr, owner, name, original) if is_own else lambda: delattr(owner, name)


def _place(name: str) -> str | None:
    """``barrier model_def.py:88`` for a call of the user's code; None for any other."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(each in file for each in PASSED_THROUGH):
            if f"{os.sep}distributed{os.sep}" in file or f"{os.sep}comm{os.sep}" in file:
                name = frame.f_code.co_name if frame.f_code.co_name not in WRAPPERS else name
        elif file.startswith((PACKAGE, STANDARD_LIBRARY, "<")) or any(each in file for each in INSTALLED):
            if not file.endswith("contextlib.py"):
                return None
        else:
            return f"{name.strip('_')} {os.path.relpath(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
