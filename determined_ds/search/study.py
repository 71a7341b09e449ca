"""A search on disk: an Optuna study in the run directory, to which every event is written before it is acted on.

It is an ordinary Optuna study, which its plots and its dashboard read: a trial for each trial, its searched
hyperparameters as parameters, its validations as intermediate values. Beside that each trial keeps its events under
their ordinals; replayed in that order, they restore the state of the search's method.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.experiment.space import Axis
from determined_ds.search.course import Event, Exited, Validated
from determined_ds.search.journal import fix_study_file, study_problem
from determined_ds.search.methods import Create

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

STUDY = "study.journal"
FORMAT = 2  # of 1, seeds and the last bits of log hyperparameters were not those of a master
ABOUT = "determined_ds"  # the study's attribute that says what it is of
EVENT = re.compile(r"event (\d{6,})")
# What becomes of a trial.
WAITING, RUNNING = "waiting", "running"
COMPLETED, STOPPED, FAILED, DROPPED = "completed", "stopped", "failed", "dropped"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a study is of.

    Args:
        name: The experiment's.
        metric: ``searcher.metric``.
        smaller_is_better: Of that metric.
        search: A digest of all that decides the search.
    """

    name: str
    metric: str
    smaller_is_better: bool
    search: str

    def as_attribute(self) -> dict[str, Any]:
        return {"format": FORMAT, "experiment": self.name, "metric": self.metric, "search": self.search}


@dataclass(frozen=True, kw_only=True)
class StudyTrial:
    """What is known of a trial.

    Args:
        number: From 1.
        status: ``waiting``, ``running``, ``completed``, ``stopped``, ``failed`` or ``dropped``.
        why: It failed or was dropped; "" elsewhere.
        point: Its searched hyperparameters, by dotted name.
        seed: Its own.
        restarts: How often it was started again after a crash.
        values: Batches trained -> the searcher's metric.
        started: None before its first process.
        ended: None before its end.
    """

    number: int
    status: str
    why: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    restarts: int = 0
    values: Mapping[int, float] = field(default_factory=dict)
    started: datetime | None = None
    ended: datetime | None = None

    def best(self, smaller_is_better: bool) -> tuple[int, float] | None:
        """(batches trained, metric) of its best validation, the first of equals; None without a finite one."""
        sign = 1 if smaller_is_better else -1
        finite = [(sign * value, steps) for steps, value in self.values.items() if math.isfinite(value)]
        if not finite:
            return None
        value, steps = min(finite)
        return steps, sign * value


class SearchStudy:
    """The study of a search; the process that opens it holds the lock of its folder.

    Args:
        path: Of its file.
        about: What it is of.
        axes: What is searched.

    Raises:
        ConfigError: the file is damaged, is not a det-ds study, or is of another search.
    """

    def __init__(self, path: Path, about: About, axes: tuple[Axis, ...]) -> None:
        self._path, self._about, self._axes = path, about, axes
        self._open(fix_study_file(path))
        self._num_events, self._num_trials = len(self.events()), len(self._frozen())
        self._complete()

    def __len__(self) -> int:
        return self._num_trials

    def _open(self, num_lines: int) -> None:
        import optuna  # a fifth of a second, for who searches only
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.study import StudyDirection

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._storage: BaseStorage = JournalStorage(JournalFileBackend(str(self._path)))
            studies = self._storage.get_all_studies()
        except Exception as error:  # Optuna reads what it wrote without looking
            raise study_problem(self._path, f"is damaged: {_said(error)}") from None
        if num_lines == 0:
            better = StudyDirection.MINIMIZE if self._about.smaller_is_better else StudyDirection.MAXIMIZE
            self._id = self._storage.create_new_study([better], self._about.name)
            self._storage.set_study_user_attr(self._id, ABOUT, self._about.as_attribute())
            return
        if len(studies) != 1:
            raise study_problem(self._path, f"holds {len(studies)} studies, and det-ds search writes one")
        self._id = self._storage.get_study_id_from_name(studies[0].study_name)
        about = studies[0].user_attrs.get(ABOUT)
        if about is None and not self._frozen() and studies[0].study_name == self._about.name:
            self._storage.set_study_user_attr(
                self._id, ABOUT, self._about.as_attribute()
            )  # it was just begun
            return
        self._check_about(about)

    def _check_about(self, about: Any) -> None:
        if not isinstance(about, dict) or "search" not in about:
            raise study_problem(self._path, "is an Optuna study, and not one of a det-ds search")
        if about.get("format") != FORMAT:
            message = f"is of format {about.get('format')}, and this version reads {FORMAT}"
            raise study_problem(
                self._path, message, "resume with the version that began it, or use another --run-dir"
            )
        if about["search"] != self._about.search:
            message = f"is of another search, {about.get('experiment')}, than {self._path.parent} holds"
            raise study_problem(self._path, message)

    def _frozen(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._id, deepcopy=False)

    # ------------------------------------------------------------------------------------------- what happened

    def events(self) -> list[Event]:
        """All events, in their order.

        Raises:
            ConfigError: some are missing.
        """
        found: dict[int, Event] = {}
        for trial in self._frozen():
            for ordinal, record in _records(trial):
                found[ordinal] = self._event(trial.number + 1, record)
        if sorted(found) != list(range(len(found))):
            raise study_problem(self._path, "is damaged: events are missing in it")
        return [found[ordinal] for ordinal in range(len(found))]

    def _event(self, number: int, record: Any) -> Event:
        try:
            if "exited" in record:
                return Exited(trial_id=number, reason=record["exited"])
            metrics = {name: float(value) for name, value in record["metrics"].items()}
            return Validated(trial_id=number, metrics=metrics, steps=int(record["steps"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise study_problem(
                self._path, f"is damaged: an event of trial {number} is not readable"
            ) from None

    def _complete(self) -> None:
        """Write what follows from an event, if its writer was killed between the two."""
        for trial in self._frozen():
            if trial.state.is_finished():
                continue
            for _, record in _records(trial):
                if "exited" in record:
                    self._finish(trial.number + 1, str(record.get("status")))
                elif int(record["steps"]) not in trial.intermediate_values:
                    self._report(trial.number + 1, record)

    def _write_event(self, number: int, record: dict[str, Any]) -> None:
        self._storage.set_trial_user_attr(number - 1, f"event {self._num_events:06d}", record)
        self._num_events += 1

    def _report(self, number: int, record: Mapping[str, Any]) -> None:
        value = float(record["metrics"][self._about.metric])
        self._storage.set_trial_intermediate_value(number - 1, int(record["steps"]), value)

    def _finish(self, number: int, status: str) -> None:
        """The end, to Optuna: it takes no more of this trial after that."""
        from optuna.trial import TrialState

        best = self.trial(number).best(self._about.smaller_is_better)
        state = {COMPLETED: TrialState.COMPLETE, STOPPED: TrialState.PRUNED}.get(status, TrialState.FAIL)
        if best is None:  # Optuna's have a value
            state = TrialState.FAIL
        values = None if best is None or state == TrialState.FAIL else [best[1]]
        self._storage.set_trial_state_values(number - 1, state, values)

    # --------------------------------------------------------------------------------------------- what happens

    def add(self, number: int, create: Create, point: Mapping[str, Any], run_dir: str) -> None:
        """A trial was created.

        Args:
            number: From 1; the next one.
            create: By the method.
            point: Its searched hyperparameters, by dotted name.
            run_dir: Relative to the study's folder.
        """
        from optuna.trial import TrialState, create_trial

        values = {axis.name: _shown(axis, point[axis.name]) for axis in self._axes}
        trial = create_trial(
            state=TrialState.WAITING,
            params=values,
            distributions={axis.name: _distribution(axis, values[axis.name]) for axis in self._axes},
            user_attrs={
                "point": dict(point),
                "seed": create.seed,
                "bracket": create.bracket,
                "run_dir": run_dir,
                "restarts": 0,
            },
        )
        found = self._storage.create_new_trial(self._id, template_trial=trial)
        assert found == number - 1, f"trial {number} became {found + 1}"
        self._num_trials += 1

    def started(self, number: int) -> None:
        """A trial has got its first process."""
        from optuna.trial import TrialState

        self._storage.set_trial_state_values(number - 1, TrialState.RUNNING)

    def restarted(self, number: int, restarts: int, why: str) -> None:
        """A trial has crashed, and is started for the so-many-th time again."""
        self._storage.set_trial_user_attr(number - 1, f"crash {restarts}", why)
        self._storage.set_trial_user_attr(number - 1, "restarts", restarts)

    def validated(self, event: Validated) -> None:
        """Write a validation; it may be acted on when this returns."""
        record = {"metrics": dict(event.metrics), "steps": event.steps}
        self._write_event(event.trial_id, record)
        self._report(event.trial_id, record)

    def ended(self, event: Exited, status: str, why: str = "") -> None:
        """Write a trial's end; it may be acted on when this returns."""
        self._write_event(event.trial_id, {"exited": event.reason, "status": status, "why": why})
        self._finish(event.trial_id, status)

    # ------------------------------------------------------------------------------------------------ what is known

    def trial(self, number: int) -> StudyTrial:
        """One of them."""
        return _known(self._storage.get_trial(number - 1))

    def trials(self) -> list[StudyTrial]:
        """All that were created, by number."""
        return [_known(trial) for trial in self._frozen()]


def _records(trial: FrozenTrial) -> Iterator[tuple[int, dict[str, Any]]]:
    """The events of a trial as they are written, by ordinal."""
    for name, record in trial.user_attrs.items():
        match = EVENT.fullmatch(name)
        if match:
            yield int(match[1]), record


def _known(trial: FrozenTrial) -> StudyTrial:
    records = [record for _, record in sorted(_records(trial), key=lambda item: item[0])]
    ends = [record for record in records if "exited" in record]
    status = str(ends[-1].get("status")) if ends else (RUNNING if trial.datetime_start else WAITING)
    return StudyTrial(
        number=trial.number + 1,
        status=status,
        why=str(ends[-1].get("why", "")) if ends else "",
        point=trial.user_attrs.get("point", {}),
        seed=int(trial.user_attrs.get("seed", 0)),
        restarts=int(trial.user_attrs.get("restarts", 0)),
        values=dict(sorted(trial.intermediate_values.items())),
        started=trial.datetime_start,
        ended=trial.datetime_complete,
    )


def _is_plain(values: list[Any]) -> bool:
    """Whether Optuna distinguishes these categories, and can store them."""
    if not all(value is None or isinstance(value, (str, bool, int, float)) for value in values):
        return False
    return all(values.index(value) == index for index, value in enumerate(values))


def _shown(axis: Axis, value: Any) -> Any:
    """A value as Optuna has it: itself, or as text where Optuna could not distinguish it from another."""
    if axis.kind == "categorical" and not _is_plain(axis.spec["vals"]):
        return json.dumps(value, sort_keys=True)
    return value


def _distribution(axis: Axis, value: Any) -> BaseDistribution:
    """The distribution that a hyperparameter is drawn from, for plots."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.kind == "categorical":
        shown = [_shown(axis, choice) for choice in axis.spec["vals"]]
        return CategoricalDistribution(list(dict.fromkeys(shown)))
    low, high = axis.spec["minval"], axis.spec["maxval"]
    if axis.kind == "int":
        return IntDistribution(low, high)
    if axis.kind == "log":
        base = float(axis.spec["base"])
        low, high = sorted((base**low, base**high))
    low, high = min(low, value), max(high, value)  # rounding may have left it a bit outside
    return FloatDistribution(low, high, log=axis.kind == "log" and low > 0)


def _said(error: Exception) -> str:
    return f"Optuna cannot read it ({type(error).__name__})"
