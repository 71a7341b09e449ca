"""Points of a search space: what is worked out of one holds for all that have the same values of what it read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Point(dict[str, Any]):
    """The hyperparameters of one point, which record those of them that are read. Reading the keys is free.

    Args:
        values: The hyperparameters.
        searched: The names of those that differ between points.
        known: What was worked out of points so far; all points of one search share it, and no others.
    """

    def __init__(
        self, values: Mapping[str, Any], searched: frozenset[str], known: dict[Hashable, Any]
    ) -> None:
        super().__init__(values)
        self.searched = searched
        self.known = known
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:  # in Python, so that dict(point) reads each value by its key
        return super().__iter__()

    items, values = Mapping.items, Mapping.values  # type: ignore[assignment]  # by point[name]
    __eq__ = __ne__ = __or__ = __ror__ = copy = None  # type: ignore[assignment]  # would read values unseen

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns; it is called once for all points with the same values of what it reads of them.

        Args:
            what: Of what kind the result is, and all that it depends on beside the point.
            make: It reads hyperparameters from this point alone.
        """
        # The names that were read -> their values -> the result.
        made: dict[tuple[str, ...], dict[tuple[str, ...], T]] = self.known.setdefault(what, {})
        for names, results in made.items():
            if (values := self._values(names)) in results:
                self.read.update(names)
                return results[values]
        before, self.read = self.read, set()
        try:
            result = make()
        finally:
            read, self.read = self.read, before | self.read
        names = tuple(sorted(read & self.searched))
        made.setdefault(names, {})[self._values(names)] = result
        return result

    def _values(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """As texts, since 1, 1.0 and true are equal, and not the same."""
        return tuple([repr(dict.__getitem__(self, name)) for name in names])


def shared(hyperparameters: Mapping[str, Any], what: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returns; of a :class:`Point` of a search, once for all that are alike."""
    return hyperparameters.once(what, make) if isinstance(hyperparameters, Point) else make()
