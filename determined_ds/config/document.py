"""A mapping read from text, that remembers where each of its values came from."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from determined_ds.errors import ConfigError, Origin, Problem

KeyPath = tuple[str | int, ...]
MAX_UNKNOWN = 20
MAX_WORD = 100


@dataclass(frozen=True)
class Place:
    """Where a key stands in its file; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """A mapping and the origin of every value in it.

    Args:
        name: What to call it in messages: the file as the user wrote it, or ``hyperparameters``.
        data: The plain mapping. Never changed in place: :meth:`overwritten` returns a new document.
        places: Key path -> place in the file, for every key that was read from text.
        overwrites: Key path -> origin, for values laid over the text (``--set``, ``overwrite_deepspeed_args``).
        prefix: Dotted name of where ``data`` hangs, put before keys in messages.
    """

    name: str
    data: dict[str, Any]
    places: Mapping[KeyPath, Place] = field(default_factory=dict)
    overwrites: Mapping[KeyPath, str] = field(default_factory=dict)
    prefix: str = ""

    def key(self, path: KeyPath) -> str:
        """Dotted name of a path, prefix included."""
        return dotted((self.prefix, *path) if self.prefix else path)

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at ``path`` came from: ``file:line``, an overwrite, or the document's name.

        The nearest overwritten ancestor wins over the text; else the nearest ancestor with a place.
        """
        for end in range(len(path), 0, -1):
            if path[:end] in self.overwrites:
                origin = self.overwrites[path[:end]]
                return origin if isinstance(origin, Origin) else Origin(origin)
        for end in range(len(path), 0, -1):
            place = self.places.get(path[:end])
            if place is not None:
                return _origin(self.name, place)
        return Origin(self.name, file=self.name if self.places else "")

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """The value at ``path``, or ``default`` where any step of it is missing."""
        return get_path(self.data, path, default)

    def sub(self, path: KeyPath) -> Document:
        """The document below ``path``; places and overwrites travel along. The value must be a mapping."""
        value = self.get(path)
        assert isinstance(value, dict), path
        length = len(path)

        def below(table: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
            return {key[length:]: item for key, item in table.items() if key[:length] == path and key != path}

        # An overwrite of an ancestor covers everything below it.
        covering: dict[KeyPath, str] = {
            (key,): self.origin((*path, key)) for key in value if self._covered((*path, key))
        }
        return Document(
            name=self.name,
            data=value,
            places=below(self.places),
            overwrites={**covering, **below(self.overwrites)},
            prefix=self.key(path),
        )

    def _covered(self, path: KeyPath) -> bool:
        return any(path[:end] in self.overwrites for end in range(1, len(path)))

    def overwritten(self, path: KeyPath, value: Any, origin: str) -> Document:
        """A copy with ``value`` laid over ``path``: mappings merge leaf by leaf, all else replaces.

        As ``merge_dicts`` in determined 0.38.1's ``util.py`` has it: an empty mapping over a mapping adds
        nothing, and takes nothing away.
        """
        data = copy.deepcopy(self.data)
        overwrites = dict(self.overwrites)
        node: dict[Any, Any] = data
        for step in path[:-1]:
            if not isinstance(node.get(step), dict):
                node[step] = {}
            node = node[step]
        for leaf, leaf_value in _leaves(value, path, node.get(path[-1])):
            target: dict[Any, Any] = data
            for step in leaf[:-1]:
                target = target.setdefault(step, {})
            target[leaf[-1]] = copy.deepcopy(leaf_value)
            overwrites[leaf] = origin
        return Document(
            name=self.name, data=data, places=self.places, overwrites=overwrites, prefix=self.prefix
        )


def _leaves(value: Any, path: KeyPath, over: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and isinstance(over, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key), over.get(key))
    else:
        yield path, value


def _origin(name: str, place: Place) -> Origin:
    if name.startswith("--"):  # the value of a flag
        return Origin(name)
    return Origin(f"{name}:{place.line}", file=name, line=place.line, column=place.column)


def refusal(name: str, message: str, mend: str = "", place: Place | None = None) -> ConfigError:
    """The error of a text that cannot be read, with its place where that is known."""
    origin = Origin(name, file="" if name.startswith("--") else name)
    if place:
        origin = _origin(name, place).reworded(f"{name}:{place.line}:{place.column}")
    return ConfigError(Problem(key="", origin=origin, message=message, mend=mend, code="unreadable"))


def repeated(name: str, path: KeyPath, first: Place, again: Place, mend: str = "keep one of them") -> Problem:
    """The problem of a key that is given twice."""
    return Problem(
        key=dotted(path),
        message=f"given twice, on lines {first.line} and {again.line}",
        origin=_origin(name, again),
        mend=mend,
        code="duplicate-key",
    )


def words(text: str) -> frozenset[str]:
    """The words of a text; a table of names reads better so than as a list of strings."""
    return frozenset(text.split())


def dotted(path: Iterable[str | int]) -> str:
    """``("a", "b", 0)`` -> ``a.b.0``."""
    return ".".join(str(step) for step in path)


def get_path(data: Any, path: KeyPath, default: Any = None) -> Any:
    """The value at ``path`` in nested mappings and lists, or ``default``."""
    for step in path:
        known = (
            step in data if isinstance(data, Mapping) else isinstance(data, list) and step in range(len(data))
        )
        if not known:
            return default
        data = data[step]
    return data


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be, or None."""
    if len(word) > MAX_WORD:
        return None
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown_keys(
    document: Document,
    path: KeyPath,
    known: Iterable[str],
    elsewhere: Mapping[str, str] | None = None,
    *,
    suggested: Iterable[str] | None = None,
) -> Iterator[Problem]:
    """The problems of all keys of the mapping at ``path`` that nobody reads.

    Args:
        document: Where they stand.
        path: Of the mapping; what is no mapping has no keys.
        known: The keys that are read there.
        elsewhere: Key -> dotted name of where it would be read.
        suggested: The known keys that one may be advised to use; all of them if None.
    """
    section = document.get(path)
    known = frozenset(known)
    suggested = known if suggested is None else frozenset(suggested)
    unknown = [key for key in section if key not in known] if isinstance(section, dict) else []
    for key in unknown[:MAX_UNKNOWN]:
        yield unknown_key(document, (*path, key), suggested, elsewhere)
    if len(unknown) > MAX_UNKNOWN:  # e.g. a vocabulary, given by mistake
        here = (*path, unknown[MAX_UNKNOWN])
        rest = len(unknown) - MAX_UNKNOWN - 1
        yield Problem(
            key=document.key(here),
            message=f"unknown key, and so are {rest} more after it" if rest else "unknown key",
            origin=document.origin(here),
            mend=f"check that {document.name} is the file that was meant",
            code="unknown-key",
        )


def unknown_key(
    document: Document, path: KeyPath, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> Problem:
    """The problem of a key that nobody reads, with the nearest one that somebody does."""
    known = sorted(known)
    word = str(path[-1])
    guess = nearest(word, known)
    if elsewhere and word in elsewhere:
        mend = f"did you mean {elsewhere[word]}?"
    elif guess:
        mend = f"did you mean {guess!r}?"
    elif len(known) <= 16:
        mend = f"known here: {', '.join(known)}"
    else:
        mend = "remove it, or look the name up in the documentation"
    return Problem(
        key=document.key(path),
        message="unknown key",
        origin=document.origin(path),
        mend=mend,
        code="unknown-key",
    )
