"""Where a search stands: its trials, as the events so far have left them. Pure.

The method decides by the events alone, so an interrupted search is restored by replaying them::

    course = Course(make_search(searcher, space))
    course.tell(Validated(trial_id=1, metrics={"batches": 50, "validation_loss": 2.3}, steps=50))
    course.tell(Exited(trial_id=1))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from determined_ds.search.methods import Action, Create, Reason, Search


@dataclass(frozen=True, kw_only=True)
class Validated:
    """A trial has reported validation metrics.

    Args:
        trial_id: Of the trial, from 1.
        metrics: What the method reads of them: the searcher's metric, and how far the trial is.
        steps: Batches trained.
    """

    trial_id: int
    metrics: Mapping[str, float]
    steps: int


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A trial has come to its end; ``reason`` where that was not its own."""

    trial_id: int
    reason: Reason | None = None


Event = Validated | Exited


@dataclass(kw_only=True)
class CourseTrial:
    """A trial of a search.

    Args:
        number: From 1, in the order of creation.
        create: Its point and its seed.
        last: The last validation that the method received.
        stop_asked: Whether the method has stopped it.
        exited: Its end.
    """

    number: int
    create: Create
    last: Validated | None = None
    stop_asked: bool = False
    exited: Exited | None = None

    def knows(self, steps: int) -> bool:
        """Whether the method knows of a validation after so many batches, or of a later one."""
        return self.last is not None and steps <= self.last.steps


@dataclass(kw_only=True)
class Course:
    """A search under way.

    Args:
        search: Its method, which has not been asked anything yet.
        trials: All that were created, by number.
        num_events: Events so far.
        dropped_in_a_row: Impossible points since a trial has last shown that it can be trained.
    """

    search: Search
    trials: dict[int, CourseTrial] = field(default_factory=dict)
    num_events: int = 0
    dropped_in_a_row: int = 0

    def __post_init__(self) -> None:
        self._act(self.search.start())

    def tell(self, event: Event) -> list[Action]:
        """Pass on an event. Returns the method's actions; trials to create are in :attr:`trials` already."""
        trial = self.trials[event.trial_id]
        assert trial.exited is None, f"trial {trial.number} has ended"
        self.num_events += 1
        if isinstance(event, Validated):
            trial.last = event
            self.dropped_in_a_row = 0
            actions = self.search.validated(trial.number, event.metrics)
        else:
            trial.exited = event
            self.dropped_in_a_row = self.dropped_in_a_row + 1 if event.reason == "INVALID_HP" else 0
            actions = self.search.exited(trial.number, event.reason)
        self._act(actions)
        return actions

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Create):
                number = len(self.trials) + 1
                self.trials[number] = CourseTrial(number=number, create=action)
                self._act(self.search.created(number, action))
            else:
                self.trials[action.trial_id].stop_asked = True

    @property
    def open_trials(self) -> list[CourseTrial]:
        """Those that have not ended, in the order of creation."""
        return [trial for trial in self.trials.values() if trial.exited is None]
