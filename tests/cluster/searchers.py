"""The searches of the master of tests, by the methods of ``det-ds search``; ``test_recorded.py`` judges them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tests.cluster.state import Json
from tests.package import SearchMethod

Reason = Literal["INVALID_HP", "ERRORED", "CANCELED"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A trial to create."""

    hparams: dict[str, Json]
    seed: int


class Searcher:
    """A search: its methods return trials to create (:class:`Wanted`) and the ids of trials to stop.

    Args:
        config: The experiment's, complete.
    """

    def __init__(self, config: dict[str, Json]) -> None:
        seed = config["reproducibility"]["experiment_seed"]
        self._method = SearchMethod(config["searcher"], config.get("hyperparameters") or {}, seed)
        self._ids: list[int] = []

    def start(self) -> list[Wanted | int]:
        """The first trials."""
        return self._of(self._method.start())

    def created(self, trial_id: int) -> None:
        """The next trial that was wanted was created."""
        self._ids.append(trial_id)

    def validated(self, trial_id: int, metrics: dict[str, Any]) -> list[Wanted | int]:
        """A trial reported a validation."""
        return self._of(self._method.validated(self._ids.index(trial_id) + 1, metrics))

    def exited(self, trial_id: int, reason: Reason | None) -> list[Wanted | int]:
        """A trial ended; ``reason`` where it did not come to its end."""
        return self._of(self._method.exited(self._ids.index(trial_id) + 1, reason))

    def _of(self, actions: list[tuple[Any, ...]]) -> list[Wanted | int]:
        return [
            Wanted(hparams=rest[0], seed=rest[1]) if kind == "create" else self._ids[rest[0] - 1]
            for kind, *rest in actions
        ]
