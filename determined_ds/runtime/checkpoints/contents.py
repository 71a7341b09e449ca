"""What a checkpoint may hold: plain data, checked before it is written and read back without executing anything."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.trial.author import described, method_of, place_of

FIX = "leave it out of state_dict: return only tensors, numbers, strings, lists and dicts that load_state_dict needs"
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
ALLOWED: list[Any] = []  # filled at the first use

# ------------------------------------------------------------------------------------------- before writing


def check_callbacks(callbacks: Mapping[str, Any]) -> None:
    """Refuse, before training, a callback whose state no checkpoint could hold.

    Raises:
        CheckpointError: names the callback, its class, and what of its state cannot be written.
    """
    for name, callback in callbacks.items():
        try:
            state = callback.state_dict()
        except Exception:  # it may need something from training: then the first checkpoint reports it
            continue
        check_state(f"callback {name!r}: {method_of(callback, 'state_dict')}", state)


def check_state(owner: str, state: Any) -> None:
    """Refuse a state that cannot be pickled; tensors and arrays always can. The message names its owner."""
    found = _unpicklable(state, "its state")
    if found:
        raise CheckpointError(f"{owner}: {found}, which no checkpoint can hold\n  fix: {FIX}")


def check_loadable(part: Any, checkpoint: Mapping[str, Any], callbacks: Mapping[str, Any]) -> None:
    """Refuse a state that was written and cannot be read back.

    Args:
        part: The file, open or by its path.
        checkpoint: What was written.
        callbacks: Name -> callback.

    Raises:
        CheckpointError: names the owner of the state, and the classes that torch does not load.
    """
    with torch.serialization.safe_globals(_allowed()):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(part)
        owner = "the state of a reducer or of the training data, or what a callback added to the checkpoint,"
        for name, state in checkpoint["callbacks"].items() if unsafe else ():
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            if torch.serialization.get_unsafe_globals_in_checkpoint(file):
                owner = f"the state of callback {name!r} ({type(callbacks[name]).__name__})"
    if unsafe:
        raise CheckpointError(
            f"{owner} holds objects of {', '.join(unsafe)}, which a checkpoint cannot be read back with: return "
            "tensors, numbers, strings, lists and dicts from state_dict, or allow the class by "
            "torch.serialization.add_safe_globals"
        )


def _unpicklable(value: Any, place: str) -> str:
    """The first value inside that cannot be pickled, with its place; "" where all can."""
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor, np.ndarray)):
        return ""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next((found for key, item in items if (found := _unpicklable(item, f"{place}[{key!r}]"))), "")
    try:
        pickle.dumps(value)
    except Exception as error:  # whatever an object's own methods raise
        return f"{place} is {described(value)} ({error})"
    return ""


def copied_attributes(reducer: Any) -> dict[str, Any]:
    """A copy of a reducer's attributes; not of ``fn``, the function of a simple reducer.

    Raises:
        CheckpointError: names the one that cannot be copied.
    """
    copies, kind = {}, type(reducer)
    for name, value in vars(reducer).items():
        if name == "fn":
            continue
        try:
            copies[name] = copy.deepcopy(value)
        except Exception as error:  # whatever an object's own methods raise
            place = place_of(kind)
            raise CheckpointError(
                f"{kind.__name__}{f' ({place})' if place else ''}: the attribute {name!r} of this reducer is "
                f"{described(value)}, which cannot be copied ({error}); a validation and a checkpoint copy its values\n"
                f"  fix: hold it in an attribute of the class, not of the object: {name} = ... under class "
                f"{kind.__name__}"
            ) from error
    return copies


# ------------------------------------------------------------------------------------------- reading


def _allowed() -> list[Any]:
    """What a checkpoint may name besides tensors and plain values: classes that only hold values."""
    if not ALLOWED:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
        from numpy._core.multiarray import _reconstruct, scalar

        ALLOWED.extend((DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, _reconstruct, scalar))
        ALLOWED.extend((np.ndarray, np.dtype, torch.Size, torch.device))
        ALLOWED.extend(getattr(np.dtypes, name) for name in np.dtypes.__all__)
    return ALLOWED


@contextlib.contextmanager
def only_data() -> Iterator[None]:
    """In here, ``torch.load`` executes nothing of what it loads, also where DeepSpeed calls it."""
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_allowed()):
            yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before


def to_their_kind_of_device(device: torch.device) -> Callable[[Any, str], Any]:
    """``torch.load``'s ``map_location``: what was on a GPU goes to this rank's, all else to the host.

    A reducer adds up on the device of its batches: on the host, its next addition would fail.
    """

    def place(storage: Any, location: str) -> Any:
        return storage.to(device=device) if location.startswith(device.type) else storage

    return place


def another_model(uuid: str, reason: str) -> ConfigError:
    """The error of a checkpoint that was written by another model or another optimizer."""
    message = f"does not fit this model and this optimizer: {reason}"
    fix = "use the model, its sizes and the optimizer that wrote it, or start anew without it"
    return ConfigError(Problem(key="checkpoint", value=uuid, message=message, fix=fix, code="another-model"))


def read_data(file: Path, **options: Any) -> Any:
    """What a file of torch's holds, executing nothing of it.

    Args:
        file: Of a checkpoint.
        options: Of ``torch.load``.

    Raises:
        CheckpointError: it is not there, or no file of torch's; or what it holds could run code.
    """
    try:
        with only_data():
            return torch.load(file, **options)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing\n  fix: use another checkpoint, or copy the file again"
        ) from None
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise runs_code(str(file), error) from error
        raise _not_torchs(file, error) from error
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a file that was cut, torch raises one of ten
        raise _not_torchs(file, error) from error


def _not_torchs(file: Path, error: Exception) -> CheckpointError:
    words = str(error).partition(". ")[0] or type(error).__name__
    return CheckpointError(
        f"{file} is not what torch.save wrote: {words}\n  fix: use another checkpoint, or copy the file again"
    )


def runs_code(path: str, error: Exception) -> CheckpointError:
    """The error of a checkpoint with objects that torch does not load as data."""
    found = re.findall(r"GLOBAL ([\w.]+)", str(error))
    what, why = (f"objects of {', '.join(dict.fromkeys(found))}", "") if found else ("objects", f": {error}")
    message = f"checkpoint {path} holds {what} that could run code, and is not loaded{why}"
    if any(name.startswith("attrdict.") for name in found):
        message += "\n  fix: its engine was configured with an AttrDict. If you trust the file, load it with "
        message += "weights_only=False, make its ds_config a plain dict, and save it again"
    return CheckpointError(message)


@contextlib.contextmanager
def explained(uuid: str, *, own_method: bool) -> Iterator[None]:
    """Turn errors of DeepSpeed and torch about a checkpoint into messages.

    Args:
        uuid: Of the checkpoint.
        own_method: The trial overrides ``load``; errors in it keep their tracebacks.
    """
    try:
        yield
    except AssertionError as error:
        raise CheckpointError(
            f"DeepSpeed refuses checkpoint {uuid}: {error} Resume with the ZeRO stage, the slots and the model that "
            "wrote it."
        ) from error
    except pickle.UnpicklingError as error:
        raise runs_code(uuid, error) from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if own_method:
            raise
        raise another_model(uuid, f"{type(error).__name__}: {error}") from error
