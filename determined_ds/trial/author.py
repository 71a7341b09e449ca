"""Messages about values from an author's code: the method, where it is defined, and what the value is."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import Problem, TrainingError, shown

# A method that is defined in one of these packages is not the author's.
LIBRARIES = ("determined_ds", "determined", "deepspeed", "torch")
MAX_NAMES = 8


def is_of_library(defined: Any) -> bool:
    """Whether a class, function or method is not the author's."""
    module = getattr(defined, "__module__", None) or "determined_ds"
    return str(module).split(".")[0] in LIBRARIES


def written_by_author(owner: Any, *names: str) -> str:
    """The first of these methods that is not a library's; the first of all where none is.

    Args:
        owner: A trial, a callback or a reducer.
        names: Methods, the outermost first: ``train_batch``, which calls ``loss`` unless an author replaced it.
    """
    return next((name for name in names if not is_of_library(getattr(owner, name, None))), names[0])


def place_of(function: Any) -> str:
    """``model_defs/mine/trial.py:17``: where a method, function or class begins; "" where that is unknown."""
    try:
        file, line = inspect.getsourcefile(inspect.unwrap(function)), inspect.getsourcelines(function)[1]
    except (TypeError, OSError):
        return ""
    with contextlib.suppress(ValueError, OSError):  # relative to the context directory, where it is inside
        file = str(Path(str(file)).resolve().relative_to(Path.cwd()))
    return f"{file}:{line}"


def _place_of_method(owner: Any, name: str) -> str:
    """Only of an author's methods: the place of a library's does not help."""
    method = getattr(owner, name, None)
    return "" if is_of_library(method) else place_of(method)


def method_of(owner: Any, name: str) -> str:
    """``MyTrial.loss (model_defs/mine/trial.py:17)``."""
    place = _place_of_method(owner, name)
    return f"{type(owner).__name__}.{name}" + (f" ({place})" if place else "")


def metrics_source(owner: Any, *names: str) -> str:
    """The method whose metrics are reported, as messages name it; the names are as in :func:`written_by_author`."""
    return method_of(owner, written_by_author(owner, *names))


def wrong(owner: Any, name: str, value: Any, expected: str, fix: str, *, did: str = "") -> Problem:
    """The problem of a value that a method returned.

    Args:
        owner: The author's object.
        name: Of its method.
        value: What it returned.
        expected: What it should have returned.
        fix: What to write instead.
        did: What it did wrong, instead of ``returned`` and the value.
    """
    if value is None and not did:
        fix = f"add the missing return statement: {fix}"
    elif isinstance(value, type) and not did:
        fix = f"call it: return {value.__name__}(...)"
    return Problem(
        key=f"{type(owner).__name__}.{name}",
        origin=_place_of_method(owner, name),
        message=f"{did or f'returned {described(value)}'}; expected {expected}",
        fix=fix,
        code="returned",
    )


def failed(owner: Any, name: str, value: Any, expected: str, fix: str, *, did: str = "") -> TrainingError:
    """The same, as an error in training."""
    return TrainingError(str(wrong(owner, name, value, expected, fix, did=did)))


def described(value: Any) -> str:
    """A value in a few words: ``None``, ``a tuple of 2 (Tensor, Tensor)``, ``a tensor of shape (4, 1)``."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, torch.Tensor):
        words = f"a tensor of shape {tuple(value.shape)}" if value.ndim else "a scalar tensor"
        return words if value.is_floating_point() else f"{words} of {value.dtype}"
    if isinstance(value, (type, types.FunctionType, types.MethodType)):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    name = type(value).__name__
    if isinstance(value, (int, float, str)):
        return f"the {name} {shown(value)}"
    kind = f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
    if not isinstance(value, (Mapping, list, tuple)):
        return kind
    more = ", ..." if len(value) > MAX_NAMES else ""
    if isinstance(value, Mapping):
        return f"{kind} of {', '.join(shown(key) for key in list(value)[:MAX_NAMES]) or 'nothing'}{more}"
    kinds = ", ".join(type(item).__name__ for item in value[:MAX_NAMES])
    return f"{kind} of {len(value)} ({kinds}{more})"
