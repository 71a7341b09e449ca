"""A mapping read from text, that remembers where each of its values came from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from determined_ds.errors import NOT_GIVEN, ConfigError, Origin, Problem, shown

KeyPath = tuple[str | int, ...]
Place = tuple[int, int]  # line and column in a file, both counted from 1
Change = tuple[KeyPath, Any, str]  # path, value, and where it came from
AS_WRITTEN: Any = object()


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """A mapping and the origin of every value in it. Two documents are never equal.

    Args:
        name: What to call it in messages: the file as the user wrote it, or ``hyperparameters``.
        data: The plain mapping. Never changed in place: :meth:`overwritten` returns a new document.
        places: Key path -> place in the file, for every key that was read from text.
        overwrites: Key path -> origin, for values that overwrite the text (``--set``, ``overwrite_deepspeed_args``).
        root: Where ``data`` hangs in what the paths of ``places`` and ``overwrites`` begin with.
        prefix: Put before keys in messages.
    """

    name: str
    data: dict[str, Any]
    places: Mapping[KeyPath, Place] = field(default_factory=dict)
    overwrites: Mapping[KeyPath, str] = field(default_factory=dict)
    root: KeyPath = ()
    prefix: str = ""

    def key(self, path: KeyPath) -> str:
        """Dotted name of a path, prefix included."""
        return dotted((self.prefix, *path) if self.prefix else path)

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at ``path`` came from: ``file:line``, an overwrite, or the document's name.

        The nearest overwritten ancestor wins over the text; else the nearest ancestor with a place.
        """
        path = (*self.root, *path)
        upwards = [path[:end] for end in range(len(path), 0, -1)]
        over = next((self.overwrites[each] for each in upwards if each in self.overwrites), None)
        place = next((self.places[each] for each in upwards if each in self.places), None)
        if over is None and path not in self.places:  # a mapping, made by an overwrite of something in it
            over = next((self.overwrites[key] for key in self.overwrites if key[: len(path)] == path), None)
        if over is not None:
            return over if isinstance(over, Origin) else Origin(over)
        return (
            origin_at(self.name, place) if place else Origin(self.name, file=self.name if self.places else "")
        )

    def holding(self, data: dict[str, Any]) -> Document:
        """Other data of the same places."""
        return replace(self, data=data)

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """The value at ``path``, or ``default`` where any step of it is missing."""
        return get_path(self.data, path, default)

    def problem(
        self, path: KeyPath, message: str, fix: str, code: str = "invalid", *, value: Any = AS_WRITTEN
    ) -> Problem:
        """What is wrong at ``path``, () for the whole document, with its key and its origin.

        It shows the value there, unless another is given, or ``NOT_GIVEN``. All else is as in
        :class:`~determined_ds.errors.Problem`.
        """
        if value is AS_WRITTEN:
            value = self.get(path, NOT_GIVEN) if path else NOT_GIVEN
        return Problem(
            key=self.key(path), value=value, origin=self.origin(path), message=message, fix=fix, code=code
        )

    def sub(self, path: KeyPath) -> Document:
        """The document below ``path``, where a mapping stands."""
        return replace(self, data=self.get(path), root=(*self.root, *path), prefix=self.key(path))

    def overwritten(self, *changes: Change) -> Document:
        """A document with each (path, value, origin) in turn: mappings merge leaf by leaf, all else replaces.

        As ``merge_dicts`` in determined 0.38.1's ``util.py`` has it: an empty mapping over a mapping adds nothing, and
        takes nothing away. ``NOT_GIVEN`` takes the value away, and a section that this leaves empty. What stays the
        same is shared.
        """
        data: dict[Any, Any] = dict(self.data)
        own = {id(data): data}  # what has been copied; kept, so that no other mapping gets the id of one
        overwrites = dict(self.overwrites)

        def section(path: KeyPath) -> dict[Any, Any]:
            """The mapping at a path, to be written to; an empty one where there was none."""
            node = data
            for step in path:
                below = node.get(step)
                if id(below) not in own:
                    below = node[step] = dict(below) if isinstance(below, dict) else {}
                    own[id(below)] = below
                node = own[id(below)]
            return node

        def write(path: KeyPath, value: Any, origin: str) -> None:
            above, leaf, place = section(path[:-1]), path[-1], (*self.root, *path)
            if isinstance(value, dict) and isinstance(above.get(leaf), dict):
                for key, item in value.items():
                    write((*path, key), item, origin)
            else:
                above[leaf] = value
                overwrites[place] = origin

        for path, value, origin in changes:
            while value is NOT_GIVEN and path:
                above = section(path[:-1])
                del above[path[-1]]
                path = () if above else path[:-1]
            if value is not NOT_GIVEN:
                write(path, value, origin)
        return replace(self, data=data, overwrites=overwrites)


def origin_at(name: str, place: Place) -> Origin:
    """A place in a file, or in the value of a flag."""
    if name.startswith("--"):
        return Origin(name)
    return Origin(f"{name}:{place[0]}", file=name, line=place[0], column=place[1])


def refusal(name: str, message: str, fix: str = "", place: Place | None = None) -> ConfigError:
    """The error of a text that cannot be read, with its place where that is known."""
    origin = Origin(name, file="" if name.startswith("--") else name)
    if place:
        origin = origin_at(name, place).reworded(f"{name}:{place[0]}:{place[1]}")
    return ConfigError(Problem(key="", origin=origin, message=message, fix=fix, code="unreadable"))


# ------------------------------------------------------------------------------------------- names and paths


def words(text: str) -> frozenset[str]:
    """The words of a text; a table of names is easier to read this way than as a list of strings."""
    return frozenset(text.split())


def dotted(path: Iterable[str | int]) -> str:
    """``("a", "b", 0)`` -> ``a.b.0``."""
    return ".".join(map(str, path))


def leaves(data: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The path and the value of all that is not a mapping with something in it."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def get_path(data: Any, path: KeyPath, default: Any = None) -> Any:
    """The value at ``path`` in nested mappings and lists, or ``default``."""
    for step in path:  # asked a hundred times a point
        if isinstance(data, list):
            if step not in range(len(data)):
                return default
        elif not isinstance(data, (dict, Mapping)) or step not in data:
            return default
        data = data[step]
    return data


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to ``word``; None where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def one_of(known: Iterable[str], word: object = None) -> str:
    """The fix of a value that is none of those that are known: the nearest, and all."""
    known = list(known)
    guess = nearest(word.lower(), known) if isinstance(word, str) else None
    return f"{f'did you mean {guess}? ' if guess else ''}use one of {', '.join(known)}"


def unknown_key(
    document: Document, path: KeyPath, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> Problem:
    """The problem of a key that is not read, with the nearest one that is.

    Args:
        document: Where it stands.
        path: Of the key.
        known: The keys that are read there.
        elsewhere: Key that is read in another place -> the fix.
    """
    known, word = sorted(known), str(path[-1])
    fix = (elsewhere or {}).get(word) or meant_or_known(nearest(word, known), known)
    return document.problem(path, "unknown key", fix, "unknown-key", value=NOT_GIVEN)


def meant_or_known(guess: str | None, known: Sequence[str]) -> str:
    """The fix of an unknown key: the one that was probably meant, or those that are known in its place."""
    if guess:
        return f"did you mean {guess!r}?"
    few = len(known) <= 16
    return f"known here: {', '.join(known)}" if few else "remove it, or look the name up in the documentation"


# ------------------------------------------------------------------------------------------- what differs


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key whose value is another one now; ``NOT_GIVEN`` where it was, or is, absent."""

    path: KeyPath
    was: Any
    now: Any

    @property
    def key(self) -> str:
        return dotted(self.path)

    def __str__(self) -> str:
        return f"{self.key}: {in_words(self.was)} -> {in_words(self.now)}"


def differences(was: Any, now: Any, path: KeyPath = ()) -> Iterator[Difference]:
    """Every leaf that differs between two mappings at a path. A null counts as absent, 1 and 1.0 are the same."""
    was, now = (NOT_GIVEN if value is None or value == {} else value for value in (was, now))
    if all(value is NOT_GIVEN or isinstance(value, dict) for value in (was, now)):
        one, other = (value if isinstance(value, dict) else {} for value in (was, now))
        for key in sorted({*one, *other}, key=str):
            yield from differences(one.get(key), other.get(key), (*path, key))
        return
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (was, now))
    if was != now if numbers else repr(was) != repr(now):
        yield Difference(path=path, was=was, now=now)


def in_words(value: Any) -> str:
    """A value as messages about a change put it."""
    if value is NOT_GIVEN:
        return "not given"
    return shown(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
