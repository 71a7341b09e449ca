"""Arguments of functions by other names: accepted where they mean the same, else refused with the right name.

The table is in :mod:`determined_ds.config.aliases`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from determined_ds.config.aliases import PRECISIONS
from determined_ds.config.deepspeed.normalized import known_keys
from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import Document, nearest
from determined_ds.documents.values import kind_of
from determined_ds.errors import ConfigError, Problem, shown

P = ParamSpec("P")
R = TypeVar("R")
PRECISION, SECTIONS = "precision", "sections"
CODE = "other-name"


def takes_other_names(
    others: Mapping[str, str], known: Iterable[str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function also accepts its keyword arguments by other names.

    One that has an argument ``precision`` also accepts the switches of a precision, ``bf16=True``.

    Args:
        others: Other name -> argument.
        known: Names of the arguments; those of the signature, if None.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters if known is None else known)

        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            return cast(Callable[..., R], function)(*args, **_by_real_names(given, names, others))

        return call

    return decorate


def _by_real_names(given: Mapping[str, Any], known: list[str], others: Mapping[str, str]) -> dict[str, Any]:
    switches = PRECISIONS if PRECISION in known else {}
    arguments = {name: value for name, value in given.items() if name in known}
    written = Document(name="", data=dict(given))
    problems: list[Problem] = []
    switched: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            continue
        if name in others:
            real = others[name]
            if real in arguments and arguments[real] != value:
                message = f"is another name of {real}, which is {shown(arguments[real])}"
                problems.append(written.problem((name,), message, f"keep {real} only", CODE))
            arguments[real] = value
        elif name in switches:
            switched[name] = value
        else:
            fix = _fix_of_unknown(name, value, known, [*others, *switches])
            problems.append(written.problem((name,), "no such argument", fix, CODE))
    if switched:
        problems += _switch_precision(arguments, switched)
    if problems:
        raise ConfigError(problems)
    return arguments


def _fix_of_unknown(name: str, value: Any, known: list[str], others: list[str]) -> str:
    if SECTIONS in known and name in known_keys()["keys"]:
        return f"write {SECTIONS}={{{name!r}: ...}}"
    guess = nearest(name, [*known, *others])
    return f"did you mean {guess}?" if guess else f"use one of {', '.join(known)}"


def _switch_precision(arguments: dict[str, Any], switched: Mapping[str, Any]) -> list[Problem]:
    """Set ``precision`` as switches like ``bf16=True`` say; without bf16 and fp16 it is fp32.

    ``fp16=False`` alone leaves it as it is.
    """
    problems = []
    written = Document(name="", data=dict(switched))
    stated = arguments.get(PRECISION, AUTO)
    for name, value in switched.items():
        if not isinstance(value, bool) and value not in (None, AUTO):
            fix = f'write {PRECISION}="{PRECISIONS[name]}"; what else the section holds goes into {SECTIONS}'
            message = f"must be True or False, not {kind_of(value)}"
            problems.append(written.problem((name,), message, fix, "wrong-type"))
    on = {PRECISIONS[name] for name, value in switched.items() if value is True}
    off = {PRECISIONS[name] for name, value in switched.items() if value is False}
    clash = len(on) > 1 or on & off or stated in off or (on and stated != AUTO and stated not in on)
    if clash:
        name = next(name for name, value in switched.items() if isinstance(value, bool))
        clashing = [f"{other}={value}" for other, value in switched.items() if other != name]
        clashing += [f"{PRECISION}={stated!r}"] if stated != AUTO else []
        message = f"does not go together with {', '.join(clashing)}"
        problems.append(written.problem((name,), message, f"keep {PRECISION} only", CODE))
    elif on:
        arguments[PRECISION] = on.pop()
    elif "bf16" in off and stated == AUTO:
        arguments[PRECISION] = "fp32"
    return problems
