"""Whether a checkpoint can hold the state of a callback or reducer; if not, which part of it, and whose it is."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from determined_ds.errors import CheckpointError
from determined_ds.trial.author import described, method_of, place_of

FIX = "leave it out of state_dict: return only tensors, numbers, strings, lists and dicts that load_state_dict needs"


def check_callbacks(callbacks: Mapping[str, Any]) -> None:
    """Refuse, before training, a callback whose state no checkpoint could hold.

    Raises:
        CheckpointError: names the callback, its class, and what of its state cannot be written.
    """
    for name, callback in callbacks.items():
        try:
            state = callback.state_dict()
        except Exception:  # it may need what training has yet to give it: then the first checkpoint says so
            continue
        check_state(f"callback {name!r}: {method_of(callback, 'state_dict')}", state)


def check_state(owner: str, state: Any) -> None:
    """Refuse a state that cannot be pickled; its tensors and arrays are taken to be.

    Args:
        owner: Whose it is, for the message.
        state: What would be written.
    """
    found = _unpicklable(state, "its state")
    if found:
        raise CheckpointError(f"{owner}: {found}, which no checkpoint can hold\n  fix: {FIX}")


def not_plain(state: Any) -> list[str]:
    """The classes in a state that a checkpoint is not read back with, since reading it may execute nothing."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.serialization.get_unsafe_globals_in_checkpoint(file)


def _unpicklable(value: Any, place: str) -> str:
    """Where something that cannot be pickled is and what it is; "" where there is nothing of the kind."""
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


def copied_attributes(reducer: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of a reducer's attributes.

    Raises:
        CheckpointError: names the one that cannot be copied.
    """
    copies = {}
    for name, value in attributes.items():
        try:
            copies[name] = copy.deepcopy(value)
        except Exception as error:  # whatever an object's own methods raise
            place = place_of(type(reducer))
            raise CheckpointError(
                f"{type(reducer).__name__}{f' ({place})' if place else ''}: the attribute {name!r} of this reducer is "
                f"{described(value)}, which cannot be copied ({error}); a validation and a checkpoint copy its values\n"
                f"  fix: hold it in an attribute of the class, not of the object: {name} = ... under class "
                f"{type(reducer).__name__}"
            ) from error
    return copies
