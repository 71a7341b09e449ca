"""The search methods of Determined 0.38.1's master: which trials to create, and which to stop. Pure.

A method receives events and returns actions::

    search = make_search(searcher, space)
    todo = search.start()                       # [Create, ...]
    todo = search.created(trial_id, create)
    todo = search.validated(trial_id, {"batches": 50, "validation_loss": 2.3})
    todo = search.exited(trial_id, "INVALID_HP")

The same events in the same order give the same actions: so an interrupted search is resumed.

Source: determined v0.38.1, ``master/pkg/searcher/{grid,random,asha_stopping,adaptive_asha,tournament}.go``.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from determined_ds.experiment.space import SearchSpace, draw_trial_seed, master_random

Hparams = dict[str, Any]
Reason = Literal["INVALID_HP", "ERRORED", "CANCELED"]
MAX_CONCURRENT_TRIALS = 16  # where the configuration says nothing (schemas expconf/v0/searcher-*.json)


@dataclass(frozen=True, kw_only=True)
class Create:
    """Create a trial at this point; ``bracket`` is the part of the search that wants it."""

    hparams: Hparams
    seed: int
    bracket: int = 0


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop a trial early."""

    trial_id: int


Action = Create | Stop


# --- Points -------------------------------------------------------------------------------------------------


class Draws:
    """The points of a search, drawn as the master draws its trials, each with a seed.

    One source serves all brackets of a search: for each trial its hyperparameters are drawn by name, then its request
    id and its seed. Where a mapping holds two searched hyperparameters the master draws these two in no certain order,
    and here it is that of their names (``det-ds check`` warns of it).

    Args:
        space: What is searched, and the experiment's seed.

    Source: ``sampleAll`` in determined 0.38.1's ``master/pkg/searcher/hyperparameters.go``, ``NewCreate`` in
    ``actions.go`` there.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._random = master_random(space.seed)

    def draw(self) -> Create:
        """A trial at a random point."""
        return self.at(self.space.at([axis.draw(self._random) for axis in self.space.axes]))

    def at(self, hparams: Hparams) -> Create:
        """A trial at a given point."""
        return Create(hparams=hparams, seed=draw_trial_seed(self._random))


def grid(space: SearchSpace) -> Iterator[Hparams]:
    """Every point of a grid as it is run: from its end, so that the last hyperparameter, by name, changes fastest."""
    axes = []
    for axis in space.axes:
        assert axis.num_values is not None, f"{axis.name} has no count"
        axes.append([axis.value(index) for index in reversed(range(axis.num_values))])
    for values in itertools.product(*axes):
        yield space.at(values)


# --- Methods ------------------------------------------------------------------------------------------------


class Search:
    """A search over a space.

    Args:
        config: ``searcher`` of the experiment config, defaults filled in (:func:`with_defaults`).
        draws: Where its points come from.
    """

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        self.config = config
        self._draws = draws

    def start(self) -> list[Action]:
        """The first trials."""
        raise NotImplementedError

    def created(self, trial_id: int, create: Create) -> list[Action]:
        """A trial was created as asked."""
        return []

    def validated(self, trial_id: int, metrics: Mapping[str, Any]) -> list[Action]:
        """A trial has reported validation metrics."""
        return []

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        """A trial has ended; ``reason`` where it did not come to its end."""
        return []


class RandomSearch(Search):
    """Random points; ``single`` is one of them. An impossible point is replaced by another."""

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(config, draws)
        self._is_single = config["name"] == "single"
        self._max_trials = 1 if self._is_single else int(config["max_trials"])
        self._num_created = 0

    def start(self) -> list[Action]:
        at_once = int(self.config.get("max_concurrent_trials") or 0) or self._max_trials
        return [self._next() for _ in range(min(self._max_trials, at_once))]

    def _next(self) -> Create:
        self._num_created += 1
        return self._draws.draw()

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        if reason == "INVALID_HP" and not self._is_single:
            self._num_created -= 1
        return [self._next()] if self._num_created < self._max_trials else []


class GridSearch(Search):
    """Every point of a grid, the last first. An impossible point is dropped, and not replaced."""

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(config, draws)
        self._left = grid(draws.space)

    def start(self) -> list[Action]:
        at_once = int(self.config.get("max_concurrent_trials") or 0) or None
        return [self._draws.at(point) for point in itertools.islice(self._left, at_once)]

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        return [self._draws.at(point) for point in itertools.islice(self._left, 1)]


@dataclass(kw_only=True)
class Rung:
    """Where trials that have trained so long are compared."""

    needed: int
    metrics: list[tuple[float, int]] = field(default_factory=list)  # (metric, trial), the best first

    def insert(self, trial_id: int, metric: float) -> int:
        """Enter a metric. Returns its place: 0 is the best, and of equals the newest."""
        place = bisect.bisect_left([known for known, _ in self.metrics], metric)
        self.metrics.insert(place, (metric, trial_id))
        return place


class AsyncHalvingSearch(Search):
    """ASHA by stopping: at each rung a trial continues only if it is among the best 1/divisor so far."""

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(config, draws)
        self._divisor = float(config["divisor"])
        self._num_rungs = int(config["num_rungs"])
        self._max_trials = int(config["max_trials"])
        self.rungs = [Rung(needed=needed) for needed in rungs(config)]
        self._rung_of: dict[int, int] = {}
        self._num_invalid = 0

    def start(self) -> list[Action]:
        at_once = int(self.config.get("max_concurrent_trials") or 0)
        if not at_once:
            at_once = max(1, int(self._divisor ** (self._num_rungs - 1)))
        return [self._draws.draw() for _ in range(min(at_once, self._max_trials))]

    def created(self, trial_id: int, create: Create) -> list[Action]:
        self._rung_of[trial_id] = 0
        return []

    @property
    def _wants_more(self) -> bool:
        return len(self._rung_of) - self._num_invalid < self._max_trials

    def validated(self, trial_id: int, metrics: Mapping[str, Any]) -> list[Action]:
        metric = float(metrics[self.config["metric"]])
        if not self.config.get("smaller_is_better", True):
            metric = -metric
        if math.isnan(metric):  # NaN ranks last, as in the master's search for its place
            metric = math.inf
        if not self._is_stopped(trial_id, int(metrics[self.config["time_metric"]]), metric):
            return []
        return [Stop(trial_id=trial_id), *([self._draws.draw()] if self._wants_more else [])]

    def _is_stopped(self, trial_id: int, trained: int, metric: float) -> bool:
        for index in range(self._rung_of[trial_id], self._num_rungs):
            rung = self.rungs[index]
            self._rung_of[trial_id] = index
            if trained < rung.needed:
                return False
            place = rung.insert(trial_id, metric)
            if index == self._num_rungs - 1:
                return True
            if place >= max(1, int(len(rung.metrics) / self._divisor)):
                return True
        return False

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        if reason == "INVALID_HP":
            self._num_invalid += 1
            for rung in self.rungs:
                rung.metrics = [entry for entry in rung.metrics if entry[1] != trial_id]
            return [self._draws.draw()]
        if reason is None:
            return []
        self.rungs[self._rung_of[trial_id]].insert(trial_id, math.inf)
        return [self._draws.draw()] if self._wants_more else []


class AdaptiveAsha(Search):
    """ASHA in several brackets, which differ in how early they stop. All draw from one source."""

    def __init__(self, config: Mapping[str, Any], draws: Draws) -> None:
        super().__init__(config, draws)
        self.brackets = [AsyncHalvingSearch(bracket, draws) for bracket in brackets_of(config)]
        self._bracket_of: dict[int, int] = {}

    def _marked(self, bracket: int, actions: list[Action]) -> list[Action]:
        return [
            replace(action, bracket=bracket) if isinstance(action, Create) else action for action in actions
        ]

    def start(self) -> list[Action]:
        started = [self._marked(index, bracket.start()) for index, bracket in enumerate(self.brackets)]
        return [action for actions in started for action in actions]

    def created(self, trial_id: int, create: Create) -> list[Action]:
        self._bracket_of[trial_id] = create.bracket
        return self.brackets[create.bracket].created(trial_id, create)

    def validated(self, trial_id: int, metrics: Mapping[str, Any]) -> list[Action]:
        index = self._bracket_of[trial_id]
        return self._marked(index, self.brackets[index].validated(trial_id, metrics))

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        index = self._bracket_of[trial_id]
        return self._marked(index, self.brackets[index].exited(trial_id, reason))


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


METHODS: dict[str, type[Search]] = {
    "single": RandomSearch,
    "random": RandomSearch,
    "grid": GridSearch,
    "async_halving": AsyncHalvingSearch,
    "adaptive_asha": AdaptiveAsha,
}


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


def make_search(searcher: Mapping[str, Any], space: SearchSpace) -> Search:
    """The search of a ``searcher`` section, defaults filled in, over a space."""
    return METHODS[searcher["name"]](searcher, Draws(space))
