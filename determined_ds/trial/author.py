"""Messages about values from an author's code: the method, where it is defined, and what the value is."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, TrainingError, shown

# A method that is defined in one of these packages is not the author's.
LIBRARIES = ("determined_ds", "determined", "deepspeed", "torch")
MAX_NAMES = 8
# A method, or several, the outermost first: ``train_batch``, which calls ``loss`` unless an author replaced it. The
# first one that is not a library's is named.
Names = str | tuple[str, ...]


def refused(key: str, message: str, fix: str, code: str, *, value: Any = NOT_GIVEN) -> ConfigError:
    """The error of one problem."""
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix, code=code))


def is_of_library(defined: Any) -> bool:
    """Whether a class, function or method is not the author's."""
    module = getattr(defined, "__module__", None) or "determined_ds"
    return str(module).split(".")[0] in LIBRARIES


def place_of(function: Any) -> str:
    """``model_defs/mine/trial.py:17``: where a method, function or class begins; "" where that is unknown."""
    try:
        file, line = inspect.getsourcefile(inspect.unwrap(function)), inspect.getsourcelines(function)[1]
    except (TypeError, OSError):
        return ""
    with contextlib.suppress(ValueError, OSError):  # relative to the context directory, where it is inside
        file = str(Path(str(file)).resolve().relative_to(Path.cwd()))
    return f"{file}:{line}"


def _found(owner: Any, names: Names) -> tuple[str, str]:
    names = (names,) if isinstance(names, str) else names
    own = [name for name in names if not is_of_library(getattr(owner, name, None))]
    name = (own or names)[0]
    return f"{type(owner).__name__}.{name}", place_of(getattr(owner, name)) if own else ""


def method_of(owner: Any, *names: str) -> str:
    """``MyTrial.loss (model_defs/mine/trial.py:17)``, of a trial, a callback or a reducer."""
    name, place = _found(owner, names)
    return f"{name} ({place})" if place else name


def wrong(owner: Any, names: Names, value: Any, expected: str, fix: str, *, did: str = "") -> Problem:
    """The problem of a value that a method of ``owner`` returned; ``did`` is said instead of "returned ..."."""
    if value is None and not did:
        fix = f"add the missing return statement: {fix}"
    elif isinstance(value, type) and not did:
        fix = f"call it: return {value.__name__}(...)"
    key, origin = _found(owner, names)
    message = f"{did or f'returned {described(value)}'}; expected {expected}"
    return Problem(key=key, origin=origin, message=message, fix=fix, code="returned")


def failed(owner: Any, names: Names, value: Any, expected: str, fix: str, *, did: str = "") -> TrainingError:
    """The same, as an error in training."""
    return TrainingError(str(wrong(owner, names, value, expected, fix, did=did)))


def described(value: Any) -> str:
    """A value in a few words: ``None``, ``a tuple of 2 (Tensor, Tensor)``, ``a tensor of shape (4, 1)``."""
    name = type(value).__name__
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, torch.Tensor):
        kind = "" if value.is_floating_point() else f" of {value.dtype}"
        return f"a tensor of shape {tuple(value.shape)}{kind}"
    if isinstance(value, (int, float, str, type)):
        return f"the {name} {shown(value)}"
    kind = f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
    if not isinstance(value, (Mapping, list, tuple)):
        return kind
    is_named = isinstance(value, Mapping)
    found = [shown(each) if is_named else type(each).__name__ for each in list(value)[:MAX_NAMES]]
    inside = ", ".join([*found, "..."] if len(value) > MAX_NAMES else found)
    return f"{kind} of {inside or 'nothing'}" if is_named else f"{kind} of {len(value)} ({inside})"
