"""Messages about values from an author's code: the method, where it is defined, and what the value is."""

from __future__ import annotations

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


def written_by_author(owner: Any, *names: str) -> str:
    """The first of these methods that is not a library's; the first of all where none is.

    Args:
        owner: A trial, a callback or a reducer.
        names: Methods, the outermost first: ``train_batch``, which calls ``loss`` unless an author replaced it.
    """
    return next((name for name in names if not _is_of_library(getattr(owner, name, None))), names[0])


def _is_of_library(method: Any) -> bool:
    module = getattr(method, "__module__", None) or "determined_ds"
    return str(module).split(".")[0] in LIBRARIES


def place_of(function: Any) -> str:
    """``model_defs/mine/trial.py:17``: where a method, function or class begins; "" where that is unknown."""
    if callable(function) and not isinstance(function, type):
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"
    try:
        file = inspect.getsourcefile(function)
        return f"{shown_path(str(file))}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return ""


def shown_path(file: str) -> str:
    """A file as the user knows it: relative to the context directory, where it is inside."""
    path = Path(file)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _place_of_method(owner: Any, name: str) -> str:
    """Only of an author's methods: the place of a library's does not help."""
    method = getattr(owner, name, None)
    return "" if _is_of_library(method) else place_of(method)


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
        return _described_tensor(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return f"the function {value.__name__}"
    name = type(value).__name__
    if isinstance(value, (int, float, str)):
        return f"the {name} {shown(value)}"
    if isinstance(value, Mapping):
        return f"{_article(name)} of {_names(value)}" if value else f"an empty {name}"
    if isinstance(value, (list, tuple, set, frozenset)):
        kinds = ", ".join(type(item).__name__ for item in list(value)[:MAX_NAMES])
        more = ", ..." if len(value) > MAX_NAMES else ""
        return f"{_article(name)} of {len(value)} ({kinds}{more})" if value else f"an empty {name}"
    return _article(name)


def _described_tensor(tensor: torch.Tensor) -> str:
    words = f"a tensor of shape {tuple(tensor.shape)}" if tensor.ndim else "a scalar tensor"
    return words if tensor.is_floating_point() else f"{words} of {tensor.dtype}"


def _names(mapping: Mapping[Any, Any]) -> str:
    names = [shown(key) for key in list(mapping)[:MAX_NAMES]]
    return ", ".join(names) + (", ..." if len(mapping) > MAX_NAMES else "")


def _article(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
