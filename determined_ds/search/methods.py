"""The search methods of Determined 0.38.1's master: which trials to create, and which to stop. Pure.

A method receives events and returns actions::

    search = make_search(searcher, space)
    todo = search.start()                       # [Create, ...], numbered from 1
    todo = search.validated(1, {"batches": 50, "validation_loss": 2.3})
    todo = search.exited(1, "INVALID_HP")

The same events in the same order give the same actions: so an interrupted search is resumed.

Source: determined v0.38.1, ``master/pkg/searcher/{grid,random,asha_stopping,adaptive_asha,tournament}.go``.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from determined_ds.experiment.space import HALVING, SearchSpace, draw_trial_seed, master_random

Hparams = dict[str, Any]
Reason = Literal["INVALID_HP", "ERRORED", "CANCELED"]  # of an end that was not a trial's own
MAX_CONCURRENT_TRIALS = 16  # where the configuration says nothing (schemas expconf/v0/searcher-*.json)


@dataclass(frozen=True, kw_only=True)
class Create:
    """Create a trial at this point."""

    number: int  # of the trial, from 1
    hparams: Hparams
    seed: int


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop a trial early."""

    number: int


Action = Create | Stop


class Draws:
    """The points of a search, drawn as the master draws its trials, each with a seed.

    One source serves all brackets of a search: for each trial its hyperparameters are drawn by name, then its request
    id and its seed. Where a mapping holds two searched hyperparameters the master draws these two in no certain order,
    and here it is that of their names (``det-ds check`` warns of it).

    Source: ``sampleAll`` in determined 0.38.1's ``master/pkg/searcher/hyperparameters.go``, ``NewCreate`` in
    ``actions.go`` there.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._random = master_random(space.seed)
        self._created = 0

    def draw(self) -> Create:
        """A trial at a random point."""
        return self.at(self.space.at([axis.draw(self._random) for axis in self.space.axes]))

    def at(self, hparams: Hparams) -> Create:
        """A trial at a given point."""
        self._created += 1
        return Create(number=self._created, hparams=hparams, seed=draw_trial_seed(self._random))


def grid(space: SearchSpace) -> Iterator[Hparams]:
    """Every point of a grid as it is run: from its end, so that the last hyperparameter, by name, changes fastest."""
    axes = [[axis.value(index) for index in reversed(range(axis.num_values or 0))] for axis in space.axes]
    return map(space.at, itertools.product(*axes))


class PointSearch:
    """``single``, ``random`` and ``grid``: points that depend on no metric.

    An impossible point is replaced by another in a ``random`` search alone.
    """

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        name = config["name"]
        self._replaces = name == "random"
        self._points: Iterator[Create] = iter(draws.draw, None)
        self._left = 1 if name == "single" else int(config.get("max_trials") or 0)
        if name == "grid":
            self._points, self._left = map(draws.at, grid(draws.space)), draws.space.size or 0
        self._at_once = int(config.get("max_concurrent_trials") or 0) or self._left

    def start(self) -> list[Action]:
        """The first trials."""
        return self._next(self._at_once)

    def _next(self, most: int) -> list[Action]:
        count = min(most, self._left)
        self._left -= count
        return list(itertools.islice(self._points, count))

    def validated(self, number: int, metrics: Mapping[str, Any]) -> list[Action]:
        """A trial has reported validation metrics."""
        return []

    def exited(self, number: int, reason: Reason | None = None) -> list[Action]:
        """A trial has ended; ``reason`` where it did not come to its end."""
        self._left += self._replaces and reason == "INVALID_HP"
        return self._next(1)


class HalvingSearch:
    """``async_halving``, and ``adaptive_asha``, whose brackets differ in how early they stop."""

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        self._brackets = [_Bracket(each, draws) for each in brackets_of(config)]

    def start(self) -> list[Action]:
        """The first trials."""
        return [action for bracket in self._brackets for action in bracket.start()]

    def validated(self, number: int, metrics: Mapping[str, Any]) -> list[Action]:
        """A trial has reported validation metrics, ``searcher.time_metric`` among them."""
        return self._bracket_of(number).validated(number, metrics)

    def exited(self, number: int, reason: Reason | None = None) -> list[Action]:
        """A trial has ended; ``reason`` where it did not come to its end."""
        return self._bracket_of(number).exited(number, reason)

    def _bracket_of(self, number: int) -> _Bracket:
        return next(bracket for bracket in self._brackets if number in bracket.rung_of)


class _Bracket:
    """ASHA by stopping: at each rung a trial continues only if it is among the best 1/divisor so far."""

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        self._config, self._draws = config, draws
        self._divisor, self._max_trials = float(config["divisor"]), int(config["max_trials"])
        self._needed = rungs(config)
        # Of each rung the (metric, trial) that came so far, the best first.
        self._metrics: list[list[tuple[float, int]]] = [[] for _ in self._needed]
        self.rung_of: dict[int, int] = {}  # of its trials
        self._num_invalid = 0

    def start(self) -> list[Action]:
        at_once = int(self._config.get("max_concurrent_trials") or 0)
        at_once = at_once or max(1, int(self._divisor ** (len(self._needed) - 1)))
        return [self._draw() for _ in range(min(at_once, self._max_trials))]

    def _draw(self) -> Create:
        create = self._draws.draw()
        self.rung_of[create.number] = 0
        return create

    def _another(self) -> list[Action]:
        return [self._draw()] if len(self.rung_of) - self._num_invalid < self._max_trials else []

    def validated(self, number: int, metrics: Mapping[str, Any]) -> list[Action]:
        metric = float(metrics[self._config["metric"]])
        if not self._config.get("smaller_is_better", True):
            metric = -metric
        if math.isnan(metric):  # NaN ranks last, as in the master's search for its place
            metric = math.inf
        trained = int(metrics[self._config["time_metric"]])
        for index in range(self.rung_of[number], len(self._needed)):
            self.rung_of[number] = index
            if trained < self._needed[index]:
                return []
            place = self._insert(index, number, metric)
            is_top = index == len(self._needed) - 1
            if is_top or place >= max(1, int(len(self._metrics[index]) / self._divisor)):
                return [Stop(number=number), *self._another()]
        return []

    def _insert(self, rung: int, number: int, metric: float) -> int:
        """Enter a metric. Returns its place: 0 is the best, and of equals the newest."""
        place = bisect.bisect_left([known for known, _ in self._metrics[rung]], metric)
        self._metrics[rung].insert(place, (metric, number))
        return place

    def exited(self, number: int, reason: Reason | None) -> list[Action]:
        if reason == "INVALID_HP":
            self._num_invalid += 1
            self._metrics = [[each for each in rung if each[1] != number] for rung in self._metrics]
            return [self._draw()]
        if reason is None:
            return []
        self._insert(self.rung_of[number], number, math.inf)
        return self._another()


def rungs(config: Mapping[str, Any]) -> tuple[int, ...]:
    """When ``async_halving`` judges trials, in units of ``time_metric``, the lowest rung first.

    A trial is judged at its first validation at or after a rung, and for all rungs behind it at once.
    """
    ahead = range(config["num_rungs"] - 1, -1, -1)
    return tuple(max(int(config["max_time"] / config["divisor"] ** rung), 1) for rung in ahead)


def brackets_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sections of the ``async_halving`` searches that run side by side, that of the most rungs first."""
    if config["name"] == "async_halving":
        return [dict(config)]
    divisor, max_trials = float(config["divisor"]), int(config["max_trials"])
    numbers = sorted(config.get("bracket_rungs") or (), reverse=True)
    if not numbers:
        sizes = [math.log(config[key]) / math.log(divisor) for key in ("max_time", "max_trials")]
        most = min(config["max_rungs"], *(int(size) + 1 for size in sizes))
        fewest = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[config["mode"]]
        numbers = list(range(most, fewest - 1, -1))
    weights = [divisor ** (number - 1) / number for number in numbers]
    trials = [max(1, int(weight / sum(weights) * max_trials)) for weight in weights]
    trials[0] += max(0, max_trials - sum(trials))
    at_once = int(config.get("max_concurrent_trials") or 0)
    if at_once:
        each, more = divmod(max(at_once, len(numbers)), len(numbers))
        concurrent = [each + (index < more) for index in range(len(numbers))]
    else:
        concurrent = [max(trials[-1], int(divisor))] * len(numbers)
    return [
        {**config, "num_rungs": number, "max_trials": most_trials, "max_concurrent_trials": most_at_once}
        for number, most_trials, most_at_once in zip(numbers, trials, concurrent, strict=True)
    ]


def with_defaults(searcher: Mapping[str, Any]) -> dict[str, Any]:
    """A ``searcher`` section with what the master fills in where nothing is said, or null.

    Source: determined 0.38.1's schemas ``expconf/v0/searcher-*.json``.
    """
    defaults = {
        "name": "single",
        "smaller_is_better": True,
        "max_concurrent_trials": MAX_CONCURRENT_TRIALS,
        "divisor": 4.0,
        "max_rungs": 5,
        "mode": "standard",
    }
    given = {key: value for key, value in searcher.items() if value is not None}
    return {**searcher, **defaults, **given}


def make_search(searcher: Mapping[str, Any], space: SearchSpace) -> PointSearch | HalvingSearch:
    """The search of a ``searcher`` section, defaults filled in, over a space."""
    return (HalvingSearch if searcher["name"] in HALVING else PointSearch)(searcher, Draws(space))
