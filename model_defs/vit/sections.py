"""Keys of an experiment's ``data`` section, or hyperparameters, into a typed dataclass: all that is wrong at once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from determined_ds.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a value must be.

    Args:
        holds: Whether a value is so.
        message: What is said of one that is not: a sentence that begins with "is".
        fix: What to write instead; the key's default, if empty.
    """

    holds: Callable[[Any], bool]
    message: str
    fix: str = ""


def text(*, optional: bool = True) -> Rule:
    """A string that is not empty; or null, where that is allowed."""
    return Rule(
        holds=lambda value: (value is None and optional) or (isinstance(value, str) and bool(value)),
        message="is a string or null." if optional else "is a string.",
    )


def flag(*, optional: bool = False) -> Rule:
    """True or false; or null, where that is allowed."""
    return Rule(
        holds=lambda value: (value is None and optional) or isinstance(value, bool),
        message="is true, false or null." if optional else "is true or false.",
    )


def whole(at_least: int, *, optional: bool = False) -> Rule:
    """A whole number from ``at_least`` on; or null, where that is allowed."""
    return Rule(
        holds=lambda value: (
            (value is None and optional)
            or (isinstance(value, int) and not isinstance(value, bool) and value >= at_least)
        ),
        message=f"is a whole number, at least {at_least}{', or null' if optional else ''}.",
    )


def number(
    low: float, high: float, words: str, *, optional: bool = False, low_included: bool = False
) -> Rule:
    """A number in (low, high), or [low, high); or null, where that is allowed."""

    def holds(value: Any) -> bool:
        if value is None:
            return optional
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return low < value < high or (low_included and value == low)

    return Rule(holds=holds, message=f"is {words}{', or null' if optional else ''}.")


def one_of(names: Iterable[str], *, optional: bool = False) -> Rule:
    """One of these words; or null, where that is allowed."""
    known = list(names)
    return Rule(
        holds=lambda value: (value is None and optional) or (isinstance(value, str) and value in known),
        message=f"is one of {', '.join(known)}{', or null' if optional else ''}.",
        fix=f"one of {', '.join(known)}",
    )


def parse_section(
    kind: Callable[..., T],
    given: Mapping[str, Any] | None,
    rules: Mapping[str, Rule],
    *,
    section: str = "data",
    closed: bool = True,
) -> T:
    """Check keys and values, before any file is read.

    Args:
        kind: A dataclass whose fields are the keys, each with a default.
        given: The section.
        rules: What the value of each key must be.
        section: Its name in the experiment YAML.
        closed: Whether other keys are refused; hyperparameters hold those of others, too.

    Raises:
        ConfigError: Everything that is wrong.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        message, fix = "is a mapping of keys to values.", f"{section}: {{}}"
        raise ConfigError(Problem(key=section, value=given, message=message, fix=fix))
    defaults = {field.name: field.default for field in fields(kind)}  # type: ignore[arg-type]
    assert MISSING not in defaults.values(), kind
    assert defaults.keys() == rules.keys(), kind
    problems = [
        _unknown_key(section, name, given[name], list(defaults))
        for name in given
        if closed and name not in defaults
    ]
    for name, rule in rules.items():
        if name in given and not rule.holds(given[name]):
            default = "null" if defaults[name] is None else str(defaults[name]).lower()
            fix = rule.fix or f"{section}.{name}: {default}"
            if rule.fix and isinstance(given[name], str):
                fix += _nearest(given[name], rule.fix.removeprefix("one of ").split(", "))
            problems.append(
                Problem(key=f"{section}.{name}", value=given[name], message=rule.message, fix=fix)
            )
    if problems:
        raise ConfigError(problems)
    return kind(**{name: given[name] for name in defaults if name in given})


def _unknown_key(section: str, name: Any, value: Any, known: list[str]) -> Problem:
    nearest = difflib.get_close_matches(str(name), known, n=1)
    fix = f"did you mean {section}.{nearest[0]}?" if nearest else f"one of {', '.join(known)}"
    return Problem(key=f"{section}.{name}", value=value, message="no such key.", fix=fix)


def _nearest(value: str, known: list[str]) -> str:
    found = difflib.get_close_matches(value.lower(), known, n=1)
    return f"; the nearest is {found[0]}" if found else ""
