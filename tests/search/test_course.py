"""A search is where its events have left it: told again, they lead to the same trials, points and stops."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.search.course import Course, Event, Exited, Validated
from determined_ds.search.methods import Action, Create, Reason, Stop
from tests.search.test_methods import ADAPTIVE, ASHA, SPACE, search_of

CONFIGS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "random": {"name": "random", "max_trials": 7, "max_concurrent_trials": 3},
    "grid": {"name": "grid", "max_concurrent_trials": 2},
    "async_halving": {
        **ASHA,
        "divisor": 2,
        "num_rungs": 3,
        "max_trials": 7,
        "max_time": 8,
        "max_concurrent_trials": 2,
    },
    "adaptive_asha": {**ADAPTIVE, "divisor": 2, "max_trials": 7, "max_time": 8, "max_concurrent_trials": 3},
}
GRID = {
    "a": {"type": "categorical", "vals": [1, 2, 3]},
    "b": {"type": "int", "minval": 1, "maxval": 9, "count": 2},
}


def course_of(name: str) -> Course:
    return Course(search=search_of(CONFIGS[name], GRID if name == "grid" else SPACE, seed=5))


def happen(course: Course, luck: random.Random, most: int) -> list[tuple[Event, list[Action]]]:
    """Up to so many events, each of any trial that has not ended, with what the method answered."""
    told: list[tuple[Event, list[Action]]] = []
    while len(told) < most and course.open_trials:
        trial = luck.choice(course.open_trials)
        event: Event
        if trial.stop_asked or luck.random() < 0.3:
            reasons: list[Reason | None] = [None, None, "ERRORED", "INVALID_HP"]
            event = Exited(trial_id=trial.number, reason=None if trial.stop_asked else luck.choice(reasons))
        else:
            steps = (trial.last.steps if trial.last else 0) + luck.choice([1, 2, 4])
            loss = luck.choice([luck.random(), float("inf"), 0.5])
            event = Validated(trial_id=trial.number, metrics={"loss": loss, "batches": steps}, steps=steps)
        told.append((event, course.tell(event)))
    return told


@pytest.mark.parametrize("name", CONFIGS)
@given(luck=st.integers(0, 2**31), first=st.integers(0, 25), then=st.integers(1, 10))
def test_a_course_told_again_goes_on_as_it_would_have(name: str, luck: int, first: int, then: int) -> None:
    source = random.Random(luck)
    course = course_of(name)
    before = happen(course, source, first)

    again = course_of(name)
    assert [again.tell(event) for event, _ in before] == [actions for _, actions in before]
    assert again.trials == course.trials
    assert (again.num_events, again.dropped_in_a_row) == (course.num_events, course.dropped_in_a_row)

    state = source.getstate()
    went_on = happen(course, source, then)
    source.setstate(state)
    assert happen(again, source, then) == went_on
    assert again.trials == course.trials


@pytest.mark.parametrize("name", CONFIGS)
def test_a_course_comes_to_an_end(name: str) -> None:
    course = course_of(name)
    happen(course, random.Random(1), 10_000)
    assert not course.open_trials
    assert all(trial.exited for trial in course.trials.values())


def test_trials_are_numbered_in_the_order_in_which_the_method_asked_for_them() -> None:
    course = course_of("random")
    assert list(course.trials) == [1, 2, 3]
    [create] = course.tell(Exited(trial_id=2, reason="INVALID_HP"))
    assert isinstance(create, Create)
    assert course.trials[4].create == create
    assert [trial.number for trial in course.open_trials] == [1, 3, 4]


def test_a_stop_is_a_mark_until_the_trial_has_ended() -> None:
    course = course_of("async_halving")
    course.tell(Validated(trial_id=1, metrics={"loss": 1.0, "batches": 2}, steps=2))
    actions = course.tell(Validated(trial_id=2, metrics={"loss": 2.0, "batches": 2}, steps=2))
    assert actions[0] == Stop(trial_id=2)
    assert course.trials[2].stop_asked
    assert course.trials[2] in course.open_trials
    course.tell(Exited(trial_id=2))
    assert course.trials[2] not in course.open_trials


def test_impossible_points_are_counted_until_a_trial_trains() -> None:
    course = course_of("random")
    course.tell(Exited(trial_id=1, reason="INVALID_HP"))
    course.tell(Exited(trial_id=2, reason="INVALID_HP"))
    assert course.dropped_in_a_row == 2
    course.tell(Validated(trial_id=3, metrics={"loss": 1.0}, steps=1))
    assert course.dropped_in_a_row == 0
