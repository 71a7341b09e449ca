"""The search methods of Determined 0.38.1's master: which trials to create, and which to stop. Pure.

A method is told what happens, and answers with what to do::

    search = make_searcher(config, seed=0)
    todo = search.start()                       # [Create, ...]
    todo = search.created(trial_id, create)
    todo = search.validated(trial_id, {"batches": 50, "validation_loss": 2.3})
    todo = search.exited(trial_id, "INVALID_HP")

Source: determined v0.38.1, ``master/pkg/searcher/{grid,random,asha_stopping,adaptive_asha,tournament}.go``.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Hparams = dict[str, Any]
Reason = Literal["INVALID_HP", "ERRORED", "CANCELED"]


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


def is_spec(value: Any) -> bool:
    """Whether a value under ``hyperparameters`` is a hyperparameter's specification."""
    return isinstance(value, Mapping) and "type" in value


def sample(space: Mapping[str, Any], rng: random.Random) -> Hparams:
    """A random point of a space."""
    return {name: _sampled(space[name], rng) for name in sorted(space)}


def _sampled(value: Any, rng: random.Random) -> Any:
    if not is_spec(value):
        return sample(value, rng) if isinstance(value, Mapping) else value
    kind = value["type"]
    if kind == "const":
        return value["val"]
    if kind == "categorical":
        return rng.choice(value["vals"])
    if kind == "int":
        return rng.randint(value["minval"], value["maxval"])
    drawn = rng.uniform(value["minval"], value["maxval"])
    return value.get("base", 10.0) ** drawn if kind == "log" else drawn


def grid(space: Mapping[str, Any]) -> list[Hparams]:
    """Every point of a grid; the last hyperparameter, by name, changes fastest."""
    axes = list(_axes(space, ()))
    points = []
    for values in itertools.product(*(values for _, values in axes)):
        point: Hparams = {}
        for (path, _), value in zip(axes, values, strict=True):
            _put(point, path, value)
        points.append(point)
    return points


def _axes(space: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for name in sorted(space):
        value = space[name]
        if is_spec(value):
            yield (*path, name), _axis(value)
        elif isinstance(value, Mapping) and value:
            yield from _axes(value, (*path, name))
        else:
            yield (*path, name), [value]


def _axis(spec: Mapping[str, Any]) -> list[Any]:
    kind = spec["type"]
    if kind == "const":
        return [spec["val"]]
    if kind == "categorical":
        return list(spec["vals"])
    low, high, count = spec["minval"], spec["maxval"], spec["count"]
    if kind == "int":
        count = min(count, high - low + 1)
    if count == 1:
        values = [(low + high) / 2]
    else:
        values = [low + index * (high - low) / (count - 1) for index in range(count)]
    if kind == "int":
        return [math.floor(value + 0.5) for value in values]
    return [spec.get("base", 10.0) ** value for value in values] if kind == "log" else values


def _put(point: Hparams, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        point = point.setdefault(name, {})
    point[path[-1]] = value


# --- Methods ------------------------------------------------------------------------------------------------


class Search:
    """A search over a space.

    Args:
        config: ``searcher`` of the experiment config, defaults filled in.
        space: Its ``hyperparameters``.
        seed: Its ``reproducibility.experiment_seed``.
    """

    def __init__(self, config: Mapping[str, Any], space: Mapping[str, Any], seed: int) -> None:
        self.config = config
        self._space = space
        self._rng = random.Random(seed)

    def _create(self, hparams: Hparams | None = None) -> Create:
        point = sample(self._space, self._rng) if hparams is None else hparams
        return Create(hparams=point, seed=self._rng.randrange(2**31))

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

    def __init__(self, config: Mapping[str, Any], space: Mapping[str, Any], seed: int) -> None:
        super().__init__(config, space, seed)
        self._is_single = config["name"] == "single"
        self._max_trials = 1 if self._is_single else int(config["max_trials"])
        self._num_created = 0

    def start(self) -> list[Action]:
        at_once = int(self.config.get("max_concurrent_trials") or 0) or self._max_trials
        return [self._next() for _ in range(min(self._max_trials, at_once))]

    def _next(self) -> Create:
        self._num_created += 1
        return self._create()

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        if reason == "INVALID_HP" and not self._is_single:
            self._num_created -= 1
        return [self._next()] if self._num_created < self._max_trials else []


class GridSearch(Search):
    """Every point of a grid, the last first. An impossible point is dropped, and not replaced."""

    def __init__(self, config: Mapping[str, Any], space: Mapping[str, Any], seed: int) -> None:
        super().__init__(config, space, seed)
        self._left = grid(space)

    def start(self) -> list[Action]:
        at_once = int(self.config.get("max_concurrent_trials") or 0) or len(self._left)
        return [self._create(self._left.pop()) for _ in range(min(len(self._left), at_once))]

    def exited(self, trial_id: int, reason: Reason | None = None) -> list[Action]:
        return [self._create(self._left.pop())] if self._left else []


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


class AsyncHalving(Search):
    """ASHA by stopping: at each rung a trial goes on only if it is among the best 1/divisor that came by."""

    def __init__(self, config: Mapping[str, Any], space: Mapping[str, Any], seed: int) -> None:
        super().__init__(config, space, seed)
        self._divisor = float(config["divisor"])
        self._num_rungs = int(config["num_rungs"])
        self._max_trials = int(config["max_trials"])
        longest = int(config["max_time"])
        self.rungs = [
            Rung(needed=max(1, int(longest / self._divisor ** (self._num_rungs - index - 1))))
            for index in range(self._num_rungs)
        ]
        self._rung_of: dict[int, int] = {}
        self._num_invalid = 0

    def start(self) -> list[Action]:
        at_once = int(self.config.get("max_concurrent_trials") or 0)
        if not at_once:
            at_once = max(1, int(self._divisor ** (self._num_rungs - 1)))
        return [self._create() for _ in range(min(at_once, self._max_trials))]

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
        if not self._is_stopped(trial_id, int(metrics[self.config["time_metric"]]), metric):
            return []
        return [Stop(trial_id=trial_id), *([self._create()] if self._wants_more else [])]

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
            return [self._create()]
        if reason is None:
            return []
        self.rungs[self._rung_of[trial_id]].insert(trial_id, math.inf)
        return [self._create()] if self._wants_more else []


class AdaptiveAsha(Search):
    """ASHA in several brackets, which differ in how early they stop."""

    def __init__(self, config: Mapping[str, Any], space: Mapping[str, Any], seed: int) -> None:
        super().__init__(config, space, seed)
        self.brackets = [
            AsyncHalving({**config, **bracket}, space, self._rng.randrange(2**31))
            for bracket in brackets_of(config)
        ]
        self._bracket_of: dict[int, int] = {}

    def _marked(self, bracket: int, actions: list[Action]) -> list[Action]:
        return [
            Create(hparams=action.hparams, seed=action.seed, bracket=bracket)
            if isinstance(action, Create)
            else action
            for action in actions
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


def brackets_of(config: Mapping[str, Any]) -> list[dict[str, int]]:
    """The brackets of an adaptive search: rungs, trials and trials at once, the most rungs first."""
    divisor, max_trials = float(config["divisor"]), int(config["max_trials"])
    rungs = list(config.get("bracket_rungs") or [])
    if not rungs:
        most = min(
            int(config["max_rungs"]),
            int(math.log(int(config["max_time"])) / math.log(divisor)) + 1,
            int(math.log(max_trials) / math.log(divisor)) + 1,
        )
        least = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}[config["mode"]]
        rungs = list(range(least, most + 1))
    rungs.sort(reverse=True)
    weights = [divisor ** (number - 1) / number for number in rungs]
    trials = [max(1, int(weight / sum(weights) * max_trials)) for weight in weights]
    trials[0] += max(0, max_trials - sum(trials))
    at_once = int(config.get("max_concurrent_trials") or 0)
    if at_once:
        each, more = divmod(max(at_once, len(rungs)), len(rungs))
        concurrent = [each + (index < more) for index in range(len(rungs))]
    else:
        concurrent = [max(trials[-1], int(divisor))] * len(rungs)
    return [
        {"num_rungs": number, "max_trials": most_trials, "max_concurrent_trials": most_at_once}
        for number, most_trials, most_at_once in zip(rungs, trials, concurrent, strict=True)
    ]


METHODS: dict[str, type[Search]] = {
    "single": RandomSearch,
    "random": RandomSearch,
    "grid": GridSearch,
    "async_halving": AsyncHalving,
    "adaptive_asha": AdaptiveAsha,
}


def make_searcher(config: Mapping[str, Any]) -> Search:
    """The search of an experiment config, defaults filled in."""
    searcher = config["searcher"]
    seed = int(config["reproducibility"]["experiment_seed"])
    return METHODS[searcher["name"]](searcher, config.get("hyperparameters") or {}, seed)
