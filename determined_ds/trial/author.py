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
Names = str | tuple[str, ...]  # of a method, or as in :func:`method_of`


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


def _found(owner: Any, names: tuple[str, ...]) -> tuple[str, str]:
    """Of these methods the first one that is the author's, or the first of all, and the place of an author's."""
    own = [name for name in names if not is_of_library(getattr(owner, name, None))]
    name = (own or names)[0]
    return f"{type(owner).__name__}.{name}", place_of(getattr(owner, name)) if own else ""


def method_of(owner: Any, *names: str) -> str:
    """``MyTrial.loss (model_defs/mine/trial.py:17)``.

    Args:
        owner: A trial, a callback or a reducer.
        names: Methods, the outermost first: ``train_batch``, which calls ``loss`` unless an author replaced it. The
            first one that is not a library's is named.
    """
    name, place = _found(owner, names)
    return f"{name} ({place})" if place else name


def wrong(owner: Any, names: Names, value: Any, expected: str, fix: str, *, did: str = "") -> Problem:
    """The problem of a value that a method returned.

    Args:
        owner: The author's object.
        names: Of its method, as in :func:`method_of`.
        value: What it returned.
        expected: What it should have returned.
        fix: What to write instead.
        did: What it did wrong, instead of ``returned`` and the value.
    """
    if value is None and not did:
        fix = f"add the missing return statement: {fix}"
    elif isinstance(value, type) and not did:
        fix = f"call it: return {value.__name__}(...)"
    key, origin = _found(owner, (names,) if isinstance(names, str) else names)
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
        return f"a tensor of shape {tuple(value.shape)}" + f" of {value.dtype}" * (
            not value.is_floating_point()
        )
    if isinstance(value, (int, float, str, type)):
        return f"the {name} {shown(value)}"
    kind = f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
    more = ", ..." if isinstance(value, (Mapping, list, tuple)) and len(value) > MAX_NAMES else ""
    if isinstance(value, Mapping):
        return f"{kind} of {', '.join(map(shown, list(value)[:MAX_NAMES])) or 'nothing'}{more}"
    if isinstance(value, (list, tuple)):
        kinds = ", ".join(type(item).__name__ for item in value[:MAX_NAMES])
        return f"{kind} of {len(value)} ({kinds}{more})"
    return kind
