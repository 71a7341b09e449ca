"""The rows of the tables of keys: what happens to a key, and to which keys of a document it happens."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.documents.document import Document, KeyPath, dotted

# Where a configuration is used. `ddp`, only in the DeepSpeed JSON's table, is that engine in a comparison.
RUN, CLUSTER, SEARCH, MEASURE, DDP = range(5)
PLACES = ("run", "cluster", "search", "measure", "ddp")
HONOURED, REFUSED, IGNORED, DECIDED = "HRID"
ON_A_CLUSTER = "applies only on a cluster"


class Meaning(enum.Enum):
    """What a change of a key means to a run that resumes from a checkpoint, by its letter in the tables."""

    LAYOUT = "L"  # must be as it was: a checkpoint is laid out by it
    STRATEGY = "S"  # may change, where the checkpoint's tensors can be read under any strategy
    OPTIMIZER = "O"  # must be as it was, unless the optimizer's state begins anew
    COURSE = "C"  # must be as it was: the batches trained so far count by it
    EFFECT = "E"  # takes effect from now on
    NOTHING = "N"  # has no effect on a run that has begun
    RESOLVED = "J"  # is compared in what it makes: the JSON that DeepSpeed is given


@dataclass(frozen=True)
class Fate:
    """What happens to a key, and to every key below it that has no row of its own.

    Args:
        key: Dotted.
        at: A letter for each of :data:`PLACES`: ``H`` honoured; ``R`` refused; ``I`` ignored, with a warning; ``D``
            decided by the command, whose help and output say so: no warning.
        resume: What a change means to a run that resumes, see :class:`Meaning`.
        why: In a clause.
        fix: What to write instead; "" where there is nothing better to write.
        default: The value at which nothing is lost by ignoring the key. Null, false, 0 and what is empty lose
            nothing either, unless a default is stated.
    """

    key: str
    at: str
    resume: Meaning
    why: str
    fix: str = ""
    default: Any = None

    @property
    def only_on_a_cluster(self) -> bool:
        return self.why == ON_A_CLUSTER

    def is_idle(self, value: Any) -> bool:
        """Whether nothing is asked for by a value."""
        if value is None or value == "auto":
            return True
        return bool(value == self.default) if self.default is not None else not value


def rows(keys: str, letters: str, why: str, fix: str = "", default: Any = None) -> tuple[Fate, ...]:
    """A row for each of several keys, separated by spaces; ``{a,b}`` at the end of one stands for two.

    Args:
        keys: Dotted.
        letters: What happens in each place, and after a space what a change means to a run that resumes.
        why: See :class:`Fate`, as for the rest.
        fix: What to write instead.
        default: The value at which nothing is lost.
    """
    at, resume = letters.split()
    return tuple(
        Fate(key, at, Meaning(resume), why, fix, default) for word in keys.split() for key in _each(word)
    )


def _each(word: str) -> Iterator[str]:
    prefix, brace, names = word.partition("{")
    for name in names.rstrip("}").split(",") if brace else [""]:
        yield prefix + name


def table_of(*groups: Iterable[Fate]) -> dict[str, Fate]:
    """Rows by key."""
    found = {row.key: row for group in groups for row in group}
    assert len(found) == sum(len(tuple(group)) for group in groups), "a key has two rows"
    return found


def row_of(table: Mapping[str, Fate], path: KeyPath) -> Fate | None:
    """The most specific row of a key; None where it has none."""
    for end in range(len(path), 0, -1):
        row = table.get(dotted(path[:end]))
        if row is not None:
            return row
    return None


def keys_that_are(
    letter: str, document: Document, place: int, table: Mapping[str, Fate], switched: frozenset[KeyPath]
) -> list[tuple[Fate, KeyPath]]:
    """The keys of a document to which something happens in a place, each once, in the order of the document.

    Args:
        letter: What happens: ``I`` or ``R``.
        document: An experiment or a DeepSpeed JSON.
        place: One of :data:`PLACES`, by its number.
        table: Of that document.
        switched: Sections that do nothing unless their ``enabled`` is true.
    """
    inner: dict[str, set[str]] = {}
    for key, below in table.items():
        inner.setdefault(key.rpartition(".")[0], set()).add(below.at[place])
    found: dict[KeyPath, Fate] = {}
    for path, value in _leaves(document.data, (), switched):
        row = row_of(table, path)
        if row is None or row.at[place] != letter or row.is_idle(value):
            continue
        # A section is named as a whole, but key by key where one of them fares otherwise or has a fix of its own.
        fates = inner.get(row.key, {letter})
        by_key = fates != {letter} or (row.key in inner and not row.only_on_a_cluster)
        found.setdefault(path[: row.key.count(".") + 1 + by_key], row)
    return [(row, path) for path, row in found.items()]


def _leaves(
    section: dict[Any, Any], path: KeyPath, switched: frozenset[KeyPath]
) -> Iterator[tuple[KeyPath, Any]]:
    if path in switched and section.get("enabled") is not True:
        return
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key), switched)
        else:
            yield (*path, key), value
