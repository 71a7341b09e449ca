"""Points of a search space, which share what is worked out of them where it reads the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from determined_ds.documents.document import Document, words

T = TypeVar("T")


class Axes:
    """The names of what is searched in one space. No two spaces are equal, so that their results are kept apart."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)


class Point(dict[str, Any]):
    """The hyperparameters of one point, which record those of them that are read. Reading the keys is free."""

    def __init__(self, values: Mapping[str, Any], axes: Axes) -> None:
        super().__init__(values)
        self.axes = axes
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return dict.__getitem__(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return dict.get(self, name, default)

    def __iter__(self) -> Iterator[str]:  # so that a copy reads each value by its key
        return super().__iter__()

    __hash__ = None

    def once(self, document: Document, given: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What ``make`` returns; it is called once for all points with the same values of what it reads of them.

        Args:
            document: It keeps the results.
            given: All else that the result depends on.
            make: It reads hyperparameters from this point alone.
        """
        known: dict[
            tuple[str, ...], dict[tuple[str, ...], T]
        ]  # axes that were read -> their values -> results
        known = document.once((self.axes, *given), dict)
        for names, made in known.items():
            if (values := self._values(names)) in made:
                self.read.update(names)
                return made[values]
        before, self.read = self.read, set()
        result = make()
        names = tuple(sorted(self.read & self.axes.names))
        known.setdefault(names, {})[self._values(names)] = result
        self.read |= before
        return result

    def _values(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """1, 1.0 and true are equal, and not the same."""
        return tuple([repr(dict.__getitem__(self, name)) for name in names])


def _reads_all(name: str) -> Callable[..., Any]:
    def method(self: Point, *args: Any) -> Any:
        self.read.update(self.keys())
        return getattr(dict, name)(self, *args)

    return method


for _name in words("items values copy setdefault pop popitem __eq__ __ne__ __repr__ __or__ __ror__"):
    setattr(Point, _name, _reads_all(_name))
