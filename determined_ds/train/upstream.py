"""How Determined, DeepSpeed and torch are loaded in a rank, and what they log."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import determined as det
import torch

from determined_ds.cluster.log import lines_of
from determined_ds.devices import detect_accelerator

# A pipeline's engine and a schedule log this before their first step, in every run.
AT_EVERY_START = "Attempting to get learning rate from scheduler before it has started"


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(AT_EVERY_START)


def load_deepspeed(name: str) -> None:
    """Load DeepSpeed for an accelerator, without the code that it would compile at every start.

    What DeepSpeed and torch log at every start is silenced, except at level DEBUG; other warnings and errors stay.

    Args:
        name: ``cpu`` or ``cuda``.
    """
    os.environ["DS_ACCELERATOR"] = name
    import deepspeed
    from deepspeed.accelerator import cpu_accelerator, cuda_accelerator, get_accelerator, set_accelerator

    theirs = logging.getLogger("DeepSpeed")
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        theirs.setLevel(logging.DEBUG)
    else:
        if _is_news not in theirs.filters:
            theirs.addFilter(_is_news)
        logging.getLogger("determined.common.storage.shared").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        warnings.filterwarnings("ignore", message=r"c10d::broadcast_: an autograd kernel was not registered")
    # It chooses one for good when it is first imported (``get_accelerator`` in deepspeed 0.19.8).
    kinds = {"cpu": cpu_accelerator.CPU_Accelerator, "cuda": cuda_accelerator.CUDA_Accelerator}
    if get_accelerator().device_name() != name:
        set_accelerator(kinds[name]())
    # A shared-memory all-reduce for CPU inference, which DeepSpeed would compile at every first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    load_muon(name)
    if name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def load_muon(name: str) -> None:
    """Load Muon without torch's code generator, which takes three seconds; again, this changes nothing.

    For any optimizer, ZeRO of deepspeed 0.19.8 loads ``runtime/zero/muon/original_muon.py``, whose functions are
    decorated with ``torch.compile``. On a CPU they are left as they are: to compile them takes a minute and g++. On a
    GPU they are compiled at the first call, with sizes as constants: a function of any sizes, which torch makes at the
    second shape, rounds otherwise for the first one too, so that a run would not resume bit for bit.
    """
    from deepspeed.runtime import compiler

    def compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if torch.compiler.is_compiling():  # it is part of another function that is compiled
                return function(*args, **kwargs)
            compiled = compiled or torch.compile(function, dynamic=False)
            return compiled(*args, **kwargs)

        return call

    own = compiler.compile
    compiler.compile = lambda: compiled_when_called if name == "cuda" else lambda function: function
    try:
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = own


@contextlib.contextmanager
def only_errors(name: str) -> Iterator[None]:
    """In here a logger shows errors only."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _WithLevel(logging.Formatter):
    """Determined's format; each line of this library's begins with the level, and a problem is one line."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name.partition(".")[0] != "determined_ds":
            return super().format(record)
        return "\n".join(lines_of(f"{record.levelname}: ", record.getMessage()))


def log_in_task(accelerator: str | None) -> None:
    """Log for the task's log from now on; to be called before DeepSpeed is loaded.

    DeepSpeed warns on each rank where it finds no GPU, unless ``DS_ACCELERATOR`` is set.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_WithLevel(det.LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    os.environ["DS_ACCELERATOR"] = detect_accelerator(accelerator).name
