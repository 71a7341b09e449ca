"""Recorded runs as people look at them: found in folders, their curves over batches and time, their final figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from determined_ds.checkpoints.retention import as_number, is_better
from determined_ds.documents.document import get_path
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.state import LOSS, POSITION, TRAINING, VALIDATION
from determined_ds.rundir.records import (
    COMPLETED,
    KeptWarning,
    Launch,
    RecordedRun,
    is_run,
    read_run,
    read_warnings,
)
from determined_ds.rundir.run_dir import RunDir, short

RUNNING, UNFINISHED = "running", "not finished"
LOSSES = (*LOSS, "training_loss")
# Facts of a launch that are decided, in the order of the page.
DECIDED = (
    *("strategy", "slots", "machines", "accelerator", "global_batch_size", "micro_batch_size"),
    *("accumulation", "replicas", "trial_seed"),
)


class Setting(NamedTuple):
    """A value that a run was given, as JSON text, and where it came from; "" where that is not recorded."""

    value: str
    origin: str = ""


Settings = dict[str, Setting]  # by dotted key


class Best(NamedTuple):
    """The best validation of a run: the metric that it is judged by, its value, batches trained before it."""

    metric: str
    value: float
    steps: int


class Curve(NamedTuple):
    """A metric of a run: batches trained (rising), time in training (None where a report has none), values."""

    group: str
    metric: str
    steps: list[int]
    seconds: list[float | None]
    values: list[float]


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
    def _clock(self) -> list[tuple[float, float]]:
        """Each launch: when it began, and the seconds in training before it, without pauses and lost work."""
        times = sorted(
            time for record in self.run.records if (time := as_number(record.get("time"))) is not None
        )
        parts: list[tuple[float, float]] = []
        for begin in [launch.time for launch in self.run.launches] or times[:1]:
            last = max((time for time in times if time < begin), default=None)
            before = parts[-1][1] + max(0.0, last - parts[-1][0]) if parts and last is not None else 0.0
            parts.append((begin, before))
        return parts

    @property
    def starts(self) -> list[float]:
        """Seconds in training at each launch."""
        return [before for _, before in self._clock]

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Its curves, e.g. ``training/loss``, in the order in which their metrics came. Only numbers are in them."""
        found: dict[str, Curve] = {}
        for record in self.run.records:
            group, step = record["group"], record["steps_completed"]
            time, seconds = as_number(record.get("time")), None
            if time is not None and self._clock:
                part = next(
                    (part for part in reversed(self._clock) if part[0] <= time), (self._clock[0][0], 0.0)
                )
                seconds = round(part[1] + max(0.0, time - part[0]), 3)
            metrics = record["metrics"] if isinstance(record["metrics"], Mapping) else {}
            for metric, value in metrics.items():
                number = value if type(value) is float else as_number(value)
                if number is None or metric in (*POSITION, "steps_completed"):
                    continue
                name = f"{group}/{metric}"
                curve = found.setdefault(name, Curve(group, metric, [], [], []))
                if curve.steps and step < curve.steps[-1]:
                    continue
                if curve.steps and step == curve.steps[-1]:  # reported again
                    for each in (curve.steps, curve.seconds, curve.values):
                        each.pop()
                curve.steps.append(step)
                curve.seconds.append(seconds)
                curve.values.append(number)
        return found

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
    def why(self) -> str:
        """Why it is not complete; "" where nothing is to be said."""
        if self.status in (RUNNING, COMPLETED):
            return ""
        if self.run.result is None:
            return "it wrote no result.json: the command that started it was killed, or its machine went down"
        return self.run.result.reason or ""

    @property
    def about_configuration(self) -> list[str]:
        """What its launches have warned of, each once."""
        return list(dict.fromkeys(text for launch in self.run.launches for text in launch.warnings))

    @property
    def steps(self) -> int:
        """Batches trained."""
        reported = [int(record["steps_completed"]) for record in self.run.records]
        return max([*reported, self.run.result.steps_completed if self.run.result else 0, 0])

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The point that is trained."""
        found = self.launch.hyperparameters if self.launch else self.run.config.get("hyperparameters")
        return dict(found) if isinstance(found, Mapping) else {}

    @property
    def planned(self) -> int | None:
        """Batches that it is to train; None where that is not stated in batches."""
        length = get_path(self.hyperparameters, ("fit", "max_length", "batches"))
        return length if isinstance(length, int) else None

    @property
    def smaller_is_better(self) -> bool:
        """Of the metric that it is judged by."""
        return get_path(self.run.config, ("searcher", "smaller_is_better")) is not False

    @property
    def metric(self) -> str:
        """The validation metric that it is judged by; "" where it has none."""
        given = get_path(self.run.config, ("searcher", "metric"))
        validated = [curve.metric for curve in self.curves.values() if curve.group == VALIDATION]
        return str(given) if given in validated else "".join(validated[:1])

    @property
    def best(self) -> Best | None:
        """Its best validation."""
        curve = self.curves.get(f"{VALIDATION}/{self.metric}")
        best: Best | None = None
        for step, value in zip(curve.steps, curve.values, strict=True) if curve else ():
            if is_better(value, best and best.value, smaller_is_better=self.smaller_is_better):
                best = Best(self.metric, value, step)
        return best

    def training(self, *metrics: str) -> list[float]:
        """The values of a training metric, the first of these that there is; they may not be finite."""
        known = (self.curves.get(f"{TRAINING}/{metric}") for metric in metrics)
        return next((curve.values for curve in known if curve), [])

    def figures(self) -> dict[str, float | None]:
        """Its final figures; None where they are not known."""
        ends = [end for curve in self.curves.values() if (end := curve.seconds[-1]) is not None]
        found: dict[str, float | None] = {
            "batches": self.steps,
            "seconds": max(ends, default=None),
            "loss": next(iter(self.training(*LOSSES)[-1:]), None),
            "best": self.best.value if self.best else None,
        }
        for name in ("samples_per_second", "tokens_per_second", "peak_memory_gib"):
            values = [value for value in self.training(name) if math.isfinite(value)]
            one_of = max if name == "peak_memory_gib" else statistics.median
            found[name] = one_of(values) if values else None
        return found

    @cached_property
    def sections(self) -> dict[str, Settings]:
        """All that it was given: what was decided, hyperparameters, what DeepSpeed gets, where it ran."""
        launch = self.launch
        ds_config: Any = (launch.ds_config if launch else None) or self.run.ds_config
        hyperparameters = dict(self.hyperparameters)
        for key in ("deepspeed_config", "overwrite_deepspeed_args") if ds_config else ():
            if isinstance(hyperparameters.get(key), Mapping):  # it is part of ds_config
                del hyperparameters[key]
        machine = dict(launch.machine) if launch else {}
        memory = machine.pop("memory_bytes", None)
        if isinstance(memory, (int, float)):
            machine["memory"] = f"{memory / 2**30:.1f} GiB"
        sections = {
            "decided": {k: v for k in DECIDED if (v := getattr(launch, k, None)) not in (None, "", 0)},
            "hyperparameters": hyperparameters,
            "DeepSpeed": ds_config,
            "environment": {**(launch.versions if launch else {}), **machine},
        }
        folder = str(self.run.path.resolve())  # a path in the run directory is the same in every run
        found: dict[str, Settings] = {}
        for name, tree in sections.items():
            for key, value in _leaves(tree, ""):
                origins, at = launch.origins if launch and name == "DeepSpeed" else {}, key
                while at and at not in origins:  # that of the mapping that it is in
                    at = at.rpartition(".")[0]
                text = value if isinstance(value, str) else json.dumps(value, default=str)
                setting = Setting(text.replace(folder, "RUN_DIR"), str(origins.get(at, "")))
                found.setdefault(name, {})[key] = setting
        return found


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and (tree or not prefix):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


def differing(runs: Sequence[RunView], *sections: str) -> dict[str, tuple[str | None, ...]]:
    """Key -> its value in each run, of the keys in some sections whose values differ; None where a run lacks the key.

    Keys of DeepSpeed's configuration begin with ``deepspeed_config.``.
    """
    prefix = {"DeepSpeed": "deepspeed_config."}
    each = [
        {
            prefix.get(name, "") + key: setting.value
            for name in sections
            for key, setting in shown.sections.get(name, {}).items()
        }
        for shown in runs
    ]
    keys = dict.fromkeys(key for settings in each for key in settings)
    values = {key: tuple(settings.get(key) for settings in each) for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def find_runs(folders: Iterable[Path]) -> list[RunView]:
    """The runs of folders and within them, in their order, each once.

    Args:
        folders: Run directories, or folders that hold some: of a search, of a comparison, of several runs.

    Raises:
        ConfigError: folders that hold no run; each of them.
    """
    paths: dict[Path, None] = {}
    problems = []
    for folder in folders:
        # Those within it come first: a search's own folder looks like that of a run.
        inner = [sorted(filter(is_run, folder.glob(pattern))) for pattern in ("trials/*", "runs/*/*", "*")]
        found = inner[0] or inner[1] or ([folder] if is_run(folder) else inner[2])
        paths.update(dict.fromkeys(found))
        if not found:
            why = "holds no run" if folder.is_dir() else "is not a folder that exists"
            fix = (
                "name a folder that det-ds run, search, compare or autotune has made (--run-dir, or one of "
                "runs/*/*), or one that holds such folders"
            )
            problems.append(Problem(key="RUN_DIR", value=str(folder), message=why, fix=fix, code="run-dir"))
    if problems:
        raise ConfigError(problems)
    runs = []
    for path, label in zip(paths, _labels(list(paths)), strict=True):
        run = read_run(path)
        damaged = (KeptWarning(message=message, source="det-ds") for message in run.damaged)
        warnings = (*damaged, *read_warnings(RunDir(path)))
        runs.append(RunView(run=run, label=label, warnings=warnings, place=short(path.resolve())))
    return runs


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest names that tell folders apart: their last parts, as many as it takes; of a search, its trials."""
    if len({path.parent for path in paths}) == 1 and all(
        path.parent.name == "trials" and path.name.isdigit() for path in paths
    ):
        return [f"trial {int(path.name)}" for path in paths]
    whole = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, whole), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({index})" for index, path in enumerate(paths, start=1)]  # one was given twice
