"""Recorded runs as people look at them: found in folders, their curves over batches and time, their final figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from determined_ds.checkpoints.files import as_number, is_better
from determined_ds.documents.document import dotted, get_path, leaves
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.live import LOSS, POSITION, TRAINING, VALIDATION, Validation
from determined_ds.report.numbers import count
from determined_ds.rundir.records import COMPLETED, RECOVERY, SKIPPED, RecordedRun, is_run, read_run
from determined_ds.rundir.run_dir import short

RUNNING, UNFINISHED = "running", "not finished"
KILLED = "it wrote no result.json: the command that started it was killed, or its machine went down"
# Facts of a launch that are decided, in the order of the page.
DECIDED = (
    *("strategy", "slots", "machines", "accelerator", "global_batch_size", "micro_batch_size"),
    *("accumulation", "replicas", "trial_seed"),
)


class Setting(NamedTuple):
    """A value that a run was given, as JSON text, and where it came from; "" where that is not recorded."""

    value: str
    origin: str = ""


class Curve(NamedTuple):
    """A metric of a run: batches trained (rising), time in training (None where a report has none), values."""

    group: str
    metric: str
    steps: list[int]
    seconds: list[float | None]
    values: list[float]


class RunView:
    """A run as people look at it.

    Args:
        run: What it has left.
        label: A name that no other run on the page has.
        place: Where it lies, for people.
    """

    def __init__(self, run: RecordedRun, label: str = "", place: str = "") -> None:
        self.run, self.label, self.place = run, label, place
        self.launch, result = run.launches[-1] if run.launches else None, run.result
        self.status = RUNNING if run.is_running else UNFINISHED if result is None else result.status
        self.why = KILLED if self.status == UNFINISHED else ""  # it is not complete
        if result is not None and self.status not in (RUNNING, COMPLETED):
            self.why = result.reason or ""
        given = self.launch.hyperparameters if self.launch else run.config.get("hyperparameters")
        self.hyperparameters: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        length = get_path(self.hyperparameters, ("fit", "max_length", "batches"))
        self.planned = length if isinstance(length, int) else None  # batches
        reported = [int(record["steps_completed"]) for record in run.records]
        self.steps = max([*reported, result.steps_completed if result else 0, 0])
        self.losses = self.training(*LOSS, "training_loss")
        # The metric that it is judged by; "" where it was not validated.
        metric = get_path(run.config, ("searcher", "metric"))
        validated = [curve.metric for curve in self.curves.values() if curve.group == VALIDATION]
        self.metric = str(metric) if metric in validated else "".join(validated[:1])
        self.smaller_is_better = get_path(run.config, ("searcher", "smaller_is_better")) is not False
        best: Validation | None = None
        curve = self.curves.get(f"{VALIDATION}/{self.metric}")
        for step, value in zip(curve.steps, curve.values, strict=True) if curve else ():
            if is_better(value, best and best.value, smaller_is_better=self.smaller_is_better):
                best = Validation(self.metric, value, step)
        self.best = best

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Its curves, e.g. ``training/loss``, in the order in which their metrics came. Only numbers are in them."""
        # When each launch began, and the seconds in training before it, without pauses and lost work.
        times = sorted(time for each in self.run.records if (time := as_number(each.get("time"))) is not None)
        before, begins = [0.0], [launch.time for launch in self.run.launches] or times[:1]
        for begin, following in pairwise(begins):
            last = max((time for time in times if time < following), default=begin)
            before.append(before[-1] + max(0.0, last - begin))
        clock = list(zip(begins, before, strict=False))

        found: dict[str, Curve] = {}
        for record in self.run.records:
            if record["group"] in (SKIPPED, RECOVERY):  # a mark, and a table
                continue
            group, step = record["group"], record["steps_completed"]
            time, seconds = as_number(record.get("time")), None
            if time is not None and clock:
                began, so_far = next((part for part in reversed(clock) if part[0] <= time), clock[0])
                seconds = round(so_far + max(0.0, time - began), 3)
            metrics = record["metrics"] if isinstance(record["metrics"], Mapping) else {}
            for metric, value in metrics.items():
                number = value if type(value) is float else as_number(value)
                if number is None or metric in (*POSITION, "steps_completed"):
                    continue
                curve = found.setdefault(f"{group}/{metric}", Curve(group, metric, [], [], []))
                if curve.steps and step < curve.steps[-1]:
                    continue
                if curve.steps and step == curve.steps[-1]:  # reported again
                    for each in curve[2:]:
                        each.pop()
                curve.steps.append(step)
                curve.seconds.append(seconds)
                curve.values.append(number)
        return found

    def training(self, *metrics: str) -> list[float]:
        """The values of a training metric, the first of these that there is; they may not be finite."""
        known = (self.curves.get(f"{TRAINING}/{metric}") for metric in metrics)
        return next((curve.values for curve in known if curve), [])

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Its final figures; None where they are not known."""
        ends = [end for curve in self.curves.values() if (end := curve.seconds[-1]) is not None]
        found: dict[str, float | None] = {
            "batches": self.steps,
            "seconds": max(ends, default=None),
            "loss": self.losses[-1] if self.losses else None,
            "best": self.best.value if self.best else None,
        }
        for name in ("samples_per_second", "tokens_per_second", "peak_memory_gib"):
            values = [value for value in self.training(name) if math.isfinite(value)]
            one_of = max if name == "peak_memory_gib" else statistics.median
            found[name] = one_of(values) if values else None
        return found

    @cached_property
    def sections(self) -> dict[str, dict[str, Setting]]:
        """All that it was given, by dotted key: what was decided, hyperparameters, DeepSpeed's JSON, where it ran."""
        launch, hyperparameters = self.launch, dict(self.hyperparameters)
        ds_config: Any = (launch.ds_config if launch else None) or self.run.ds_config
        for key in ("deepspeed_config", "overwrite_deepspeed_args") if ds_config else ():
            if isinstance(hyperparameters.get(key), Mapping):  # it is part of ds_config
                del hyperparameters[key]
        sections = {
            "decided": {k: v for k in DECIDED if (v := getattr(launch, k, None)) not in (None, "", 0)},
            "hyperparameters": hyperparameters,
            "DeepSpeed": ds_config,
            "environment": {**launch.versions, **launch.machine} if launch else {},
        }
        folder = str(self.run.path.resolve())  # a path in the run directory is the same in every run
        found: dict[str, dict[str, Setting]] = {}
        for name, tree in sections.items():
            origins = launch.origins if launch and name == "DeepSpeed" else {}
            for path, value in leaves(tree):
                at = key = dotted(path)
                while at and at not in origins:  # that of the mapping that it is in
                    at = at.rpartition(".")[0]
                text = value if isinstance(value, str) else json.dumps(value, default=str)
                setting = Setting(text.replace(folder, "RUN_DIR"), str(origins.get(at, "")))
                found.setdefault(name, {})[key] = setting
        return found


def trained_on(run: RecordedRun) -> str:
    """What its last launch trains on: ``2 slots (CPU), ZeRO 1, fp32, global batch 32 = 16 x 1 x 2 replicas``."""
    launch = run.launches[-1]
    ds_config = launch.ds_config or run.ds_config  # the latter where the code has decided it
    kind = {"cpu": "CPU", "cuda": "GPU"}.get(launch.accelerator, launch.accelerator)
    words = [count(launch.slots, "slot") + (f" ({kind})" if kind else "")]
    words += [f"{launch.machines} machines"] if launch.machines > 1 else []
    if ds_config:
        words.append(launch.strategy or f"ZeRO {get_path(ds_config, ('zero_optimization', 'stage')) or 0}")
        on = (name for name in ("bf16", "fp16") if get_path(ds_config, (name, "enabled")) is True)
        words.append(next(on, "fp32"))
    if launch.global_batch_size:
        replicas = f" x {count(launch.replicas, 'replica')}"
        parts = f" = {launch.micro_batch_size} x {launch.accumulation}{replicas}" if launch.replicas else ""
        words.append(f"global batch {launch.global_batch_size:,}{parts}")
    return ", ".join(words)


def differing(runs: Sequence[RunView], *sections: str) -> dict[str, tuple[str | None, ...]]:
    """Key -> its value in each run, of keys in some sections whose values differ; None where a run lacks it."""
    found: dict[str, list[str | None]] = {}
    for at, shown in enumerate(runs):
        for name in sections:
            prefix = "deepspeed_config." if name == "DeepSpeed" else ""
            for key, setting in shown.sections.get(name, {}).items():
                found.setdefault(prefix + key, [None] * len(runs))[at] = setting.value
    return {key: tuple(values) for key, values in found.items() if len(set(values)) > 1}


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
        paths.update(dict.fromkeys(path.resolve() for path in found))
        if not found:
            why = "holds no run" if folder.is_dir() else "is not a folder that exists"
            fix = "name a folder that det-ds run, search, compare or autotune has made, or one that holds such folders"
            problems.append(Problem(key="RUN_DIR", value=str(folder), message=why, fix=fix, code="run-dir"))
    if problems:
        raise ConfigError(problems)

    # The shortest names that tell folders apart: their last parts, as many as it takes; of a search, its trials.
    of_search = len({path.parent for path in paths}) == 1 and all(
        path.parent.name == "trials" and path.name.isdigit() for path in paths
    )
    labels, depth = [f"trial {int(path.name)}" if of_search else path.name for path in paths], 1
    while len(set(labels)) < len(labels):
        depth += 1
        labels = ["/".join(path.parts[-depth:]) for path in paths]
    return [RunView(read_run(path), label, short(path)) for path, label in zip(paths, labels, strict=True)]
