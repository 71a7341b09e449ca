"""A whole training by one strategy, from Python."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from determined_ds.config.strategy import FORMS
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, TrainingError
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.memory.units import GIB
from determined_ds.rundir.metrics_file import read_records
from determined_ds.rundir.records import INVALID
from determined_ds.rundir.run_dir import RUNS, RunDir, new_run_dir, slug
from determined_ds.rundir.run_lock import check_run_dir
from determined_ds.tune.measure import check_names
from determined_ds.tune.variants import Variant, decided, named_variants, read_base

POLL_S = 0.25
AS_IT_IS = "as_it_is"
ACCURACIES = ("validation_accuracy", "val_accuracy", "eval_accuracy", "accuracy")
LOSSES = ("validation_loss", "val_loss", "eval_loss", "loss")
DERIVED = (
    *("final_loss", "final_val_loss", "final_accuracy", "train_losses"),
    *("peak_memory_gb", "total_time", "throughput"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a training gave.

    Beside what it holds, it has the names of other trainers' results: ``final_loss``, ``final_accuracy``,
    ``train_losses``, ``peak_memory_gb``, ``total_time``, ``throughput``. :meth:`to_dict` has all of them, as a row for
    :func:`determined_ds.create_performance_visualizations`, which also takes a list of these results.

    Args:
        method: The strategy.
        slots: Ranks.
        run_dir: Its run directory.
        final_metrics: Of the last validation; numbers that are not finite are floats too.
        losses_per_epoch: The mean training loss of each epoch; the last one may be a part of an epoch; nan where it
            was not finite.
        val_losses: The loss of each validation; empty where none has one.
        seconds_per_epoch: Time spent in training batches, of each.
        peak_memory_bytes: Of the rank that took most: device memory, or resident memory on a CPU.
        samples_per_second: Over all epochs.
        tokens_per_second: The same in tokens; None where samples have none.
    """

    method: str
    slots: int
    run_dir: Path
    final_metrics: Mapping[str, Any]
    losses_per_epoch: tuple[float, ...]
    val_losses: tuple[float, ...]
    seconds_per_epoch: tuple[float, ...]
    peak_memory_bytes: int
    samples_per_second: float
    tokens_per_second: float | None

    @property
    def final_loss(self) -> float:
        """The mean training loss of the last epoch."""
        return self.losses_per_epoch[-1]

    @property
    def final_val_loss(self) -> float | None:
        """The loss of the last validation."""
        return self.val_losses[-1] if self.val_losses else None

    @property
    def final_accuracy(self) -> float | None:
        """Of the last validation, e.g. its ``validation_accuracy``; None where no one metric is an accuracy."""
        return named(self.final_metrics, ACCURACIES, ending="accuracy")

    @property
    def train_losses(self) -> tuple[float, ...]:
        """:attr:`losses_per_epoch`."""
        return self.losses_per_epoch

    @property
    def peak_memory_gb(self) -> float:
        """:attr:`peak_memory_bytes` in 10**9 bytes."""
        return self.peak_memory_bytes / 10**9

    @property
    def total_time(self) -> float:
        """Seconds in training batches, of all epochs."""
        return sum(self.seconds_per_epoch)

    @property
    def throughput(self) -> float:
        """:attr:`samples_per_second`."""
        return self.samples_per_second

    def to_dict(self) -> dict[str, Any]:
        """One row of a table: what is held, and what follows from it."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**held, **{name: getattr(self, name) for name in DERIVED}}


def named(metrics: Mapping[str, Any], names: Sequence[str], *, ending: str) -> float | None:
    """The first metric of these names; else the only one with this ending; None where there is none."""
    found = [metrics[name] for name in names if name in metrics]
    found = found or [value for name, value in metrics.items() if name.endswith(ending)]
    is_clear = bool(found) and (len(found) == 1 or any(name in metrics for name in names))
    return float(found[0]) if is_clear else None


def run_training_experiment(
    config: str | os.PathLike[str],
    context_dir: str | os.PathLike[str] = ".",
    *,
    method: str = AS_IT_IS,
    slots: int | None = None,
    overrides: Iterable[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    accelerator: str | None = None,
) -> TrainingResult:
    """Train an experiment to its end on this machine by one strategy, in processes of its own.

    Args:
        config: The experiment's YAML; how long it trains is its ``fit.max_length``.
        context_dir: The folder with the code.
        method: A strategy, as for ``det-ds compare``; ``as_it_is`` changes nothing.
        slots: Ranks, >= 1; the experiment's own, if None.
        overrides: ``KEY=VALUE`` overrides of the YAML, as ``--set``.
        run_dir: Where the run is written; ``runs/<name>_<method>/<time>``, if None.
        accelerator: ``cpu``, ``cuda`` or None for the best there is.

    Returns:
        What the training gave, from the metrics of its run directory.

    Raises:
        ConfigError: it cannot run; every reason at once.
        TrainingError: it failed, or was interrupted.
    """
    found = Problems()
    found.of(lambda: check_names("method", [method], (AS_IT_IS, *FORMS), "strategy"))
    document = found.of(
        lambda: read_document(Path(config), Path(context_dir), slots=slots, overrides=overrides)
    )
    devices = found.of(lambda: detect_accelerator(accelerator))
    found.raise_any()
    assert document is not None
    assert devices is not None
    base = read_base(_reporting_epochs(document), Path(context_dir), devices)
    if method == AS_IT_IS:
        variant = decided(base, method, base.own)
    else:
        [variant] = named_variants(base, [method], [base.experiment.slots])
    if not variant.can_run:
        raise ConfigError(variant.problems)
    name = f"{slug(base.experiment.name)}_{method}"
    where = Path(run_dir) if run_dir is not None else new_run_dir(RUNS / name, datetime.now())
    check_run_dir(where)
    _train(variant, Path(context_dir), where.resolve(), devices.name)
    return _result(variant, where.resolve())


def _reporting_epochs(document: Document) -> Document:
    """An experiment with a report after every epoch, whatever its own ``fit.reporting_period`` is."""
    fit: KeyPath = ("hyperparameters", "fit")
    if document.get((*fit, "type")) == "const":
        fit = (*fit, "val")
    path = (*fit, "reporting_period")
    if document.get(path, NOT_GIVEN) is not NOT_GIVEN:
        document = document.overwritten((path, NOT_GIVEN, ""))
    return document.overwritten((path, {"epochs": 1}, "run_training_experiment"))


def _train(variant: Variant, context_dir: Path, run_dir: Path, accelerator: str) -> None:
    assert variant.document is not None
    process = TrialProcess(
        experiment=variant.document,
        context_dir=context_dir,
        run_dir=run_dir,
        accelerator=accelerator,
        arguments=["--engine", variant.choice.engine],
    )
    with Interrupts("stopping after this batch, with a checkpoint") as interrupts:
        process.start()
        is_asked = False
        try:
            while (code := process.poll()) is None and not interrupts.at_once:
                time.sleep(POLL_S)
                if interrupts.requested and not is_asked:  # a second asking would end it at once
                    process.stop()
                    is_asked = True
        finally:
            process.kill()
    if interrupts.requested:
        raise TrainingError(f"interrupted; what was trained is in {run_dir}")
    if code:
        result = process.result()
        if result.status == INVALID:
            raise ConfigError(Problem(key="", message=result.reason or "", fix=f"see {run_dir}"))
        raise TrainingError(f"{result.reason}\nits output is in {run_dir}")


def _result(variant: Variant, run_dir: Path) -> TrainingResult:
    metrics = RunDir(run_dir).metrics
    training = read_records(metrics, "training")
    validation = [record["metrics"] for record in read_records(metrics, "validation")]
    assert variant.resolved is not None
    global_batch = variant.resolved.batch.global_batch_size
    before, samples, seconds = 0, [], []
    for record in training:
        trained = (record["steps_completed"] - before) * global_batch
        before = record["steps_completed"]
        samples.append(trained)
        seconds.append(trained / record["metrics"]["samples_per_second"])
    rate = sum(samples) / sum(seconds)
    tokens = [r["metrics"]["tokens_per_second"] for r in training if "tokens_per_second" in r["metrics"]]
    per_sample = tokens[0] / training[0]["metrics"]["samples_per_second"] if tokens else None
    val_losses = (named(metrics, LOSSES, ending="_loss") for metrics in validation)
    return TrainingResult(
        method=variant.name,
        slots=variant.choice.slots,
        run_dir=run_dir,
        final_metrics=validation[-1] if validation else {},
        losses_per_epoch=tuple(record["metrics"]["loss"] for record in training),
        val_losses=tuple(loss for loss in val_losses if loss is not None),
        seconds_per_epoch=tuple(seconds),
        peak_memory_bytes=round(GIB * max(record["metrics"]["peak_memory_gib"] for record in training)),
        samples_per_second=rate,
        tokens_per_second=None if per_sample is None else rate * per_sample,
    )
