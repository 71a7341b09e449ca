"""What differs between two configurations, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from determined_ds.documents.document import KeyPath, dotted
from determined_ds.errors import NOT_GIVEN, shown


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key whose value is another one now.

    Args:
        path: Of the key.
        was: Its value before; ``NOT_GIVEN`` where it was absent.
        now: Its value now; ``NOT_GIVEN`` where it is absent.
    """

    path: KeyPath
    was: Any
    now: Any

    @property
    def key(self) -> str:
        return dotted(self.path)

    def __str__(self) -> str:
        return f"{self.key}: {in_words(self.was)} -> {in_words(self.now)}"


def differences(was: Any, now: Any, path: KeyPath = ()) -> Iterator[Difference]:
    """Every leaf that differs between two mappings. A null counts as absent, 1 and 1.0 are the same.

    Args:
        was: Plain data.
        now: Plain data.
        path: Where both were found.
    """
    was, now = (NOT_GIVEN if value is None or value == {} else value for value in (was, now))
    if isinstance(was, dict) or isinstance(now, dict):
        one, other = (value if isinstance(value, dict) else {} for value in (was, now))
        if was is NOT_GIVEN or now is NOT_GIVEN or (isinstance(was, dict) and isinstance(now, dict)):
            for key in sorted({*one, *other}, key=str):
                yield from differences(one.get(key), other.get(key), (*path, key))
            return
    if not _same(was, now):
        yield Difference(path=path, was=was, now=now)


def _same(was: Any, now: Any) -> bool:
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (was, now)]
    return bool(was == now) if all(numbers) else repr(was) == repr(now)


def in_words(value: Any) -> str:
    """A value as messages about a change put it."""
    if value is NOT_GIVEN:
        return "not given"
    return shown(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
