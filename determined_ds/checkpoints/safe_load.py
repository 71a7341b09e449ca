"""What a checkpoint may hold: plain data, checked before it is written and read back without executing anything.

Only files of a checkpoint are held to this: what a trial or a callback loads of its own is not looked at.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.trial.returned import method_of

REFUSED = "is not one that DeepSpeed can load into this engine"
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
MOST_NAMED = 3
ANOTHER = "\n  fix: use another checkpoint, or copy the file again"

# ------------------------------------------------------------------------------------------- before writing


def check_callbacks(callbacks: Mapping[str, Any]) -> None:
    """Refuse, before training, a callback whose state no checkpoint could hold."""
    for name, callback in callbacks.items():
        try:
            state = callback.state_dict()
        except Exception:  # it may need something from training: then the first checkpoint reports it
            continue
        check_state(f"callback {name!r}: {method_of(callback, 'state_dict')}", state)


def check_state(owner: str, state: Any) -> None:
    """Refuse a state that cannot be pickled, or that could not be read back without executing code of it."""
    fix = "return only tensors, numbers, strings, lists and dicts that load_state_dict needs"
    try:
        file = serialized(state)
    except Exception as error:  # whatever an object's own methods raise
        raise CheckpointError(f"{owner} holds what no checkpoint can hold: {error}\n  fix: {fix}") from None
    with torch.serialization.safe_globals(_allowed()):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise CheckpointError(
            f"{owner} holds objects of {', '.join(unsafe)}, which a checkpoint cannot be read back with\n  fix: {fix}, "
            "or allow the class by torch.serialization.add_safe_globals"
        )


def serialized(content: Any) -> io.BytesIO:
    """What ``torch.save`` writes, open at its beginning."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


# ------------------------------------------------------------------------------------------- reading


@functools.cache
def _allowed() -> list[Any]:
    """What a checkpoint may name besides tensors and plain values: classes that only hold values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from numpy._core.multiarray import _reconstruct, scalar

    found = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, _reconstruct, scalar]
    found += [np.ndarray, np.dtype, torch.Size, torch.device]
    return [*found, *(getattr(np.dtypes, name) for name in np.dtypes.__all__)]


@contextlib.contextmanager
def reading(what: object, failure: str = "is not what torch.save wrote") -> Iterator[None]:
    """In here, ``torch.load`` executes nothing of what it loads, also where DeepSpeed calls it.

    Raises:
        CheckpointError: for what torch or DeepSpeed raises: ``what`` could not be read, and why.
    """
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_allowed()):
            yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or what} is missing{ANOTHER}") from None
    except (torch.OutOfMemoryError, CheckpointError):
        raise
    except Exception as error:  # of a file that was cut, torch raises one of ten
        if "GLOBAL" in str(error):
            found = ", ".join(dict.fromkeys(re.findall(r"GLOBAL ([\w.]+)", str(error)))) or str(error)
            raise CheckpointError(
                f"{what} holds objects of {found} that could run code, and is not loaded\n  fix: if you trust it, load "
                "the file with weights_only=False, put plain data in place of them (of an AttrDict a dict), and "
                "save it again"
            ) from error
        words = str(error).partition(". ")[0] or type(error).__name__
        raise CheckpointError(f"{what} {failure}: {words}{ANOTHER}") from error
    finally:
        del os.environ[FORCE]
        if before is not None:
            os.environ[FORCE] = before


def read_data(file: Path, **options: Any) -> Any:
    """What a file of torch's holds, executing nothing of it; ``options`` are those of ``torch.load``."""
    with reading(file):
        return torch.load(file, **options)


def some_of(reasons: Sequence[str]) -> str:
    """The first reasons, and how many more there are."""
    more = [f"and {len(reasons) - MOST_NAMED} more"] if len(reasons) > MOST_NAMED else []
    return "; ".join([*reasons[:MOST_NAMED], *more])


def another_model(uuid: str, reason: str) -> ConfigError:
    """The error of a checkpoint that was written by another model or another optimizer."""
    message = f"does not fit this model and this optimizer: {reason}"
    fix = "use the model, its sizes and the optimizer that wrote it, or start anew without it"
    return ConfigError(Problem(key="checkpoint", value=uuid, message=message, fix=fix, code="another-model"))


@contextlib.contextmanager
def engines_load_only_data(engines: Sequence[Any], uuid: str) -> Iterator[None]:
    """In here, a trial's own ``load`` may load what it likes; ``load_checkpoint`` of its engines executes nothing."""
    for engine in engines:
        engine.load_checkpoint = reading(f"checkpoint {uuid}", REFUSED)(engine.load_checkpoint)
    try:
        yield
    finally:
        for engine in engines:
            del engine.load_checkpoint  # of the instance: the method is the class's again
