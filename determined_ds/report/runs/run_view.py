"""A recorded run as people look at it: its name beside the others, what became of it, its final figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.retention import finite, is_better
from determined_ds.report.runs.curves import TRAINING, VALIDATION, Clock, Curve, clock_of, curves_of
from determined_ds.rundir.records import COMPLETED, KeptWarning, Launch, RecordedRun

RUNNING, UNFINISHED = "running", "not finished"
LOSSES = ("loss", "train_loss", "training_loss")
MEMORY = "peak_memory_gib"


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best validation of a run.

    Args:
        metric: That it is judged by.
        value: Of it.
        steps: Batches trained before it.
    """

    metric: str
    value: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run on the page.

    Args:
        run: What it has left.
        label: A name that no other run on the page has.
        warnings: What its ranks have warned of.
        place: Where it lies, for people.
    """

    run: RecordedRun
    label: str
    warnings: tuple[KeptWarning, ...] = ()
    place: str = ""

    @cached_property
    def clock(self) -> Clock:
        """Its time in training."""
        return clock_of(self.run)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Its curves by their names, e.g. ``training/loss``."""
        return {curve.name: curve for curve in curves_of(self.run, self.clock)}

    @property
    def launch(self) -> Launch | None:
        """The last one."""
        return self.run.launches[-1] if self.run.launches else None

    @property
    def status(self) -> str:
        """``running``, as of ``result.json``, or ``not finished``: it was killed, or its machine was."""
        if self.run.is_running:
            return RUNNING
        return UNFINISHED if self.run.result is None else self.run.result.status

    @property
    def is_complete(self) -> bool:
        """Whether it has trained all it was to train."""
        return self.status == COMPLETED

    @property
    def why(self) -> str:
        """Why it is not complete; "" where nothing is to be said."""
        result = self.run.result
        if self.run.is_running or self.is_complete:
            return ""
        if result is None:
            return "it wrote no result.json: the command that started it was killed, or its machine went down"
        return result.reason or ""

    @property
    def steps(self) -> int:
        """Batches trained."""
        reported = [int(record["steps_completed"]) for record in self.run.records]
        return max([*reported, self.run.result.steps_completed if self.run.result else 0, 0])

    @property
    def planned(self) -> int | None:
        """Batches that it is to train; None where that is not stated in batches."""
        fit = _mapping(_mapping(self.hyperparameters).get("fit"))
        length = _mapping(fit.get("max_length")).get("batches")
        return length if isinstance(length, int) else None

    @property
    def hyperparameters(self) -> Any:
        """The point that is trained."""
        return self.launch.hyperparameters if self.launch else self.run.config.get("hyperparameters")

    @property
    def seconds(self) -> float | None:
        """Time in training until the last report."""
        ends = [curve.seconds[-1] for curve in self.curves.values()]
        return max((end for end in ends if end is not None), default=None)

    @property
    def metric(self) -> str:
        """The validation metric that it is judged by; "" where it has none."""
        searcher = _mapping(self.run.config.get("searcher"))
        if f"{VALIDATION}/{searcher.get('metric')}" in self.curves:
            return str(searcher["metric"])
        return next((curve.metric for curve in self.curves.values() if curve.group == VALIDATION), "")

    @property
    def smaller_is_better(self) -> bool:
        """Of that metric."""
        return bool(_mapping(self.run.config.get("searcher")).get("smaller_is_better", True))

    @property
    def best(self) -> Best | None:
        """Its best validation."""
        curve = self.curves.get(f"{VALIDATION}/{self.metric}")
        best: Best | None = None
        for step, value in zip(curve.steps, curve.values, strict=True) if curve else ():
            if is_better(value, best and best.value, smaller_is_better=self.smaller_is_better):
                best = Best(metric=self.metric, value=value, steps=step)
        return best

    def last(self, *metrics: str) -> float | None:
        """The last value of a training metric, the first of these that there is; it may not be finite."""
        curve = self._training(*metrics)
        return curve.values[-1] if curve else None

    def first(self, *metrics: str) -> float | None:
        """The first value of the same."""
        curve = self._training(*metrics)
        return curve.values[0] if curve else None

    def median(self, metric: str) -> float | None:
        """The median over the training reports."""
        curve = self._training(metric)
        known = [value for value in (curve.values if curve else ()) if finite(value) is not None]
        return statistics.median(known) if known else None

    def most(self, metric: str) -> float | None:
        """The highest value of a training metric."""
        curve = self._training(metric)
        return max(
            (value for value in (curve.values if curve else ()) if finite(value) is not None), default=None
        )

    def _training(self, *metrics: str) -> Curve | None:
        return next(
            (self.curves[name] for each in metrics if (name := f"{TRAINING}/{each}") in self.curves), None
        )


def labels(paths: Sequence[Path]) -> list[str]:
    """The shortest names that tell folders apart: their last parts, as many of them as it takes.

    Those of one search are its trials.
    """
    if len({path.parent for path in paths}) == 1 and all(
        path.parent.name == "trials" and path.name.isdigit() for path in paths
    ):
        return [f"trial {int(path.name)}" for path in paths]
    whole = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, whole), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [
        f"{path.name} ({index})" for index, path in enumerate(paths, start=1)
    ]  # one of them was given twice


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
