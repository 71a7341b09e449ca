"""Texts from outside made fit to be shown: on one line, short enough, names still distinct."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

# What belongs together in the name of a strategy: `micro 16`, `pipeline of 2`, `not compiled`.
PHRASE = re.compile(r"(?:not )?\S+(?: of \S+)?(?: \d\S*)*")


def printable(text: str) -> str:
    """A text on one line, with what moves a cursor or breaks a file written out: it came from outside."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))


def shortened(text: str, most: int) -> str:
    """A text of so many characters at most."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def squeezed(text: str, most: int) -> str:
    """A text of so many characters at most, with its end: names that begin alike differ there."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end].rstrip()}…{text[len(text) - end :].lstrip()}"


def distinct_names(names: Iterable[str], most: int) -> Mapping[str, str]:
    """Names -> texts of at most ``most`` characters each; different names have different texts.

    A name that is short enough stays. Of the others, what all names have in common is left out first; what is still
    too long loses its middle; those that are alike then are numbered.

    Args:
        names: On one line each; equal ones have the same text.
        most: Characters, enough for an ellipsis and a number: 4 + the digits of their count.
    """
    return _distinct_names(tuple(dict.fromkeys(names)), most)


@functools.lru_cache(maxsize=64)
def _distinct_names(names: tuple[str, ...], most: int) -> Mapping[str, str]:
    if all(len(name) <= most for name in names):
        return MappingProxyType({name: name for name in names})
    distinct = _without_common(names)
    texts = {name: name if len(name) <= most else squeezed(distinct[name], most) for name in names}
    taken = {name for name in names if len(name) <= most}
    found: dict[str, str] = {}
    for number, name in enumerate(names, start=1):
        text = texts[name]
        if len(name) > most and (text in taken or not text):
            text = _numbered(text, number, most, taken)
        found[name] = text
        taken.add(text)
    return MappingProxyType(found)


def _without_common(names: tuple[str, ...]) -> dict[str, str]:
    """Each name without the phrases that all of them have; as it is, where nothing would be left."""
    phrases = {name: PHRASE.findall(name) for name in names}
    common = set.intersection(*(set(each) for each in phrases.values())) if len(names) > 1 else set()
    left = {name: " ".join(each for each in known if each not in common) for name, known in phrases.items()}
    return {name: text or name for name, text in left.items()}


def _numbered(text: str, number: int, most: int, taken: set[str]) -> str:
    while True:
        end = f" #{number}"
        found = squeezed(text, most - len(end)) + end
        if found not in taken:
            return found
        number += 1
