"""The searchers of the master of tests, written from Determined's documentation and recordings of a real master.

It shares no code with ``determined_ds.search``, which is judged by it: ``test_searchers.py`` compares the two, and
``test_recorded.py`` holds this one to what a real master created and stopped.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tests.cluster.state import Json

Reason = Literal["INVALID_HP", "ERRORED", "CANCELED"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A trial to create, for a part of the search."""

    hparams: dict[str, Json]
    seed: int
    bracket: int


class Searcher:
    """A search: the methods return trials to create (:class:`Wanted`) and the ids of trials to stop.

    Args:
        config: The experiment's, complete.
    """

    def __init__(self, config: dict[str, Json]) -> None:
        self._config = searcher = config["searcher"]
        self._hyperparameters = config.get("hyperparameters") or {}
        self._random = np.random.RandomState(config["reproducibility"]["experiment_seed"])
        self._name = searcher["name"]
        self._points = self._grid() if self._name == "grid" else self._drawn()
        self._most = [{"single": 1, "grid": math.inf}.get(self._name) or int(searcher["max_trials"])]
        self._at_once = [searcher.get("max_concurrent_trials") or self._most[0]]
        self._num_rungs = [0]
        if "asha" in self._name or "halving" in self._name:
            self._divide(searcher)
        self._num_wanted = [0] * len(self._most)
        self._bracket_of: dict[int, int] = {}
        self._rung_of: defaultdict[int, int] = defaultdict(int)
        self._losses: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(
            dict
        )  # by bracket and rung

    # --- Points -----------------------------------------------------------------------------------------

    def _drawn(self) -> Iterator[dict[str, Json]]:
        while True:
            yield self._replace(self._hyperparameters, self._draw)

    def _grid(self) -> Iterator[dict[str, Json]]:
        axes: list[list[Json]] = []
        self._replace(self._hyperparameters, lambda spec: axes.append(_values(spec)))
        for values in itertools.product(*(reversed(axis) for axis in axes)):
            at = iter(values)
            yield self._replace(self._hyperparameters, lambda spec, at=at: next(at))

    def _replace(self, value: Json, choose: Any) -> Any:
        """Hyperparameters with a value for each that is searched, in the order of their names."""
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind == "const":
            return value["val"]
        if kind in ("int", "double", "log", "categorical"):
            return choose(value)
        return {name: self._replace(value[name], choose) for name in sorted(value)}

    def _draw(self, spec: dict[str, Json]) -> Json:
        if spec["type"] == "categorical":
            return spec["vals"][self._below(len(spec["vals"]))]
        low, high = spec["minval"], spec["maxval"]
        if spec["type"] == "int":
            return low + self._below(high - low + 1)
        return _of_range(spec, low + (high - low) * self._random.random_sample())

    def _below(self, count: int) -> int:
        """As NumPy's ``random_interval``: the lowest bits of a word, again where they are too many."""
        mask = (1 << (count - 1).bit_length()) - 1
        while mask:
            if (drawn := int(self._random.tomaxint(1)[0] if mask >> 32 else self._word()) & mask) < count:
                return drawn
        return 0

    def _word(self) -> int:
        return int.from_bytes(self._random.bytes(4), "little")

    def _want(self, bracket: int) -> list[Wanted]:
        point = next(self._points, None)
        if point is None:
            return []
        self._num_wanted[bracket] += 1
        self._random.bytes(16)  # the request id
        return [Wanted(hparams=point, seed=self._below(2**31), bracket=bracket)]

    # --- Events -----------------------------------------------------------------------------------------

    def start(self) -> list[Wanted]:
        """The first trials."""
        counts = [min(*both) for both in zip(self._most, self._at_once, strict=True)]
        wanted = []
        for bracket, count in enumerate(counts):
            for _ in itertools.count() if math.isinf(count) else range(int(count)):
                one = self._want(bracket)
                if not one:
                    break
                wanted += one
        return wanted

    def created(self, trial_id: int, wanted: Wanted) -> None:
        """A trial was created."""
        self._bracket_of[trial_id] = wanted.bracket

    def validated(self, trial_id: int, metrics: dict[str, Any]) -> list[Wanted | int]:
        """A trial reported a validation."""
        bracket = self._bracket_of[trial_id]
        if not self._num_rungs[bracket]:
            return []
        loss = float(metrics[self._config["metric"]])
        loss = loss if self._config.get("smaller_is_better", True) else -loss
        loss = math.inf if math.isnan(loss) else loss
        trained = int(metrics[self._config["time_metric"]])
        top = self._num_rungs[bracket] - 1
        while trained >= self._needed(bracket, self._rung_of[trial_id]):
            rung = self._rung_of[trial_id]
            others = self._losses[bracket, rung]
            num_better = sum(
                other < loss for other in others.values()
            )  # of equal losses the newest is the best
            others[trial_id] = loss
            if rung == top or num_better >= max(1, int(len(others) / float(self._config["divisor"]))):
                more = self._num_wanted[bracket] < self._most[bracket]
                return [trial_id, *(self._want(bracket) if more else [])]
            self._rung_of[trial_id] += 1
        return []

    def exited(self, trial_id: int, reason: Reason | None) -> list[Wanted]:
        """A trial ended; ``reason`` where it did not come to its end."""
        bracket = self._bracket_of[trial_id]
        halves = bool(self._num_rungs[bracket])
        if reason == "INVALID_HP" and self._name not in ("single", "grid"):
            self._num_wanted[bracket] -= 1
            for rung in range(self._num_rungs[bracket]):
                self._losses[bracket, rung].pop(trial_id, None)
            return self._want(bracket)
        if halves and reason is None:
            return []
        if halves:
            self._losses[bracket, self._rung_of[trial_id]][trial_id] = math.inf
        return self._want(bracket) if self._num_wanted[bracket] < self._most[bracket] else []

    # --- Successive halving -----------------------------------------------------------------------------

    def _divide(self, searcher: dict[str, Json]) -> None:
        """Into brackets of fewer and fewer rungs; see "Adaptive ASHA" in Determined's documentation."""
        divisor, trials = float(searcher["divisor"]), int(searcher["max_trials"])
        at_once = int(searcher.get("max_concurrent_trials") or 0)
        if self._name == "async_halving":
            self._num_rungs = [int(searcher["num_rungs"])]
            self._at_once = [at_once or max(1, int(divisor ** (self._num_rungs[0] - 1)))]
            return
        levels = [int(math.log(amount) / math.log(divisor)) + 1 for amount in (searcher["max_time"], trials)]
        most = min(int(searcher["max_rungs"]), *levels)
        fewest = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[searcher["mode"]]
        stated = searcher.get("bracket_rungs") or range(fewest, most + 1)
        self._num_rungs = sorted(stated, reverse=True)
        shares = [divisor ** (rungs - 1) / rungs for rungs in self._num_rungs]
        self._most = [max(1, int(share / sum(shares) * trials)) for share in shares]
        self._most[0] += max(0, trials - sum(self._most))
        number = len(shares)
        self._at_once = [max(self._most[-1], int(divisor))] * number
        if at_once:
            at_once = max(at_once, number)
            self._at_once = [at_once // number + (index < at_once % number) for index in range(number)]

    def _needed(self, bracket: int, rung: int) -> float:
        from_top = self._num_rungs[bracket] - 1 - rung
        return max(1, int(self._config["max_time"] / float(self._config["divisor"]) ** from_top))


def _values(spec: dict[str, Json]) -> list[Json]:
    """Of one hyperparameter of a grid."""
    if spec["type"] == "categorical":
        return list(spec["vals"])
    low, high = spec["minval"], spec["maxval"]
    whole = spec["type"] == "int"
    count = min(spec.get("count") or high - low + 1, high - low + 1) if whole else spec["count"]
    numbers = [low + (high - low) * index / max(count - 1, 1) for index in range(count)]
    return [math.floor(number + 0.5) if whole else _of_range(spec, number) for number in numbers]


def _of_range(spec: dict[str, Json], number: float) -> float:
    return float(spec["base"]) ** number if spec["type"] == "log" else number
