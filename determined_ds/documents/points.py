"""Points of a search space: what is worked out of one holds for all that are alike in what it read of them."""

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
        is_any: Whether a value is one of those of its name that make no difference, unless it is read exactly.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        searched: frozenset[str],
        known: dict[Hashable, Any],
        is_any: Callable[[str, Any], bool],
    ) -> None:
        super().__init__(values)
        self.searched, self.known, self.is_any = searched, known, is_any
        self.read: set[tuple[str, bool]] = set()  # names, and whether they were read exactly

    def __getitem__(self, name: str) -> Any:
        self.read.add((name, False))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add((name, False))
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
        # What was read -> the values there -> the result.
        made: dict[tuple[tuple[str, bool], ...], dict[tuple[str, ...], T]] = self.known.setdefault(what, {})
        for reads, results in made.items():
            if (values := self._values(reads)) in results:
                self.read.update(reads)
                return results[values]
        before, self.read = self.read, set()
        try:
            result = make()
        finally:
            read, self.read = self.read, before | self.read
        reads = tuple(sorted(each for each in read if each[0] in self.searched))
        made.setdefault(reads, {})[self._values(reads)] = result
        return result

    def _values(self, reads: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
        """As texts, since 1, 1.0 and true are equal, and not the same."""
        values = [(name, dict.__getitem__(self, name), is_exact) for name, is_exact in reads]
        return tuple(
            ["" if not exact and self.is_any(name, own) else repr(own) for name, own, exact in values]
        )


def shared(hyperparameters: Mapping[str, Any], what: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returns; of a :class:`Point` of a search, once for all that are alike."""
    return hyperparameters.once(what, make) if isinstance(hyperparameters, Point) else make()


def compared(hyperparameters: Mapping[str, Any], name: str) -> None:
    """Say of a hyperparameter that was read that its exact value decides."""
    if isinstance(hyperparameters, Point):
        hyperparameters.read.add((name, True))
