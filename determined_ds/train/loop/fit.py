"""``Trainer``: Determined's ``deepspeed.Trainer`` by the same names, around this library's loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from determined import pytorch

from determined_ds.checkpoints.storage import find_checkpoint
from determined_ds.config.params import FitOptions, Length, ProfiledSteps, read_model
from determined_ds.documents.document import Document
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.results import STOPPED
from determined_ds.train.here import script_run
from determined_ds.train.loop.display import make_progress
from determined_ds.train.loop.stopping import LENGTHS
from determined_ds.train.loop.trainer import Training, section_of

logger = logging.getLogger("determined_ds")
REPORTING_PERIOD = Length(unit="batches", value=100)  # Determined's default


class Trainer:
    """Trains a ``DeepSpeedTrial``.

    Args:
        trial: The trial, its engines wrapped.
        context: From :func:`determined_ds.open_context`.
    """

    def __init__(self, trial: Any, context: Any) -> None:
        self._trial = trial
        self._context = context

    def fit(
        self,
        checkpoint_period: pytorch.TrainUnit | timedelta | None = None,
        validation_period: pytorch.TrainUnit | None = None,
        max_length: pytorch.TrainUnit | None = None,
        reporting_period: pytorch.TrainUnit | None = pytorch.Batch(100),  # noqa: B008  (Determined's default)
        checkpoint_policy: str = "best",
        latest_checkpoint: str | None = None,
        step_zero_validation: bool = False,
        test_mode: bool = False,
        profiling_enabled: bool = False,
        *,
        stop_on_nan: bool = True,
        save_total_limit: int | None = None,
        warm_start: str = "weights",
        asynchronous_checkpoints: bool | None = None,
        fork: str | os.PathLike[str] | None = None,
        profile: ProfiledSteps | Mapping[str, int] | None = None,
    ) -> None:
        """Train. The arguments are those of ``determined.pytorch.deepspeed.Trainer.fit`` (0.38.1), and six more.

        Args:
            checkpoint_period: ``Batch(n)`` or ``Epoch(n)`` from the start of training, or of a list of numbers; or a
                ``datetime.timedelta`` since the last checkpoint; None: only at the end.
            validation_period: The same, without a time.
            max_length: ``Batch(n)`` or ``Epoch(n)``, n >= 1: how much is trained.
            reporting_period: The same as ``validation_period``.
            checkpoint_policy: Validations followed by a checkpoint: ``best`` (``searcher.metric``), ``all``, ``none``.
            latest_checkpoint: Uuid of the checkpoint to resume from, of this run or Determined's trainer; or a folder.
            step_zero_validation: Validate before the first batch.
            test_mode: One batch trained, one validated, one checkpoint saved, loaded back, validated again.
            profiling_enabled: As ``profiling.enabled`` of the experiment; on a cluster.
            stop_on_nan: Stop at a loss, or a ``searcher.metric``, that is not finite, before it is saved.
            save_total_limit: Checkpoints to keep at most, >= 1, always with the best and the newest; None: all.
            warm_start: What is loaded of another trial's checkpoint: ``weights``, or ``all``: the optimizer too.
            asynchronous_checkpoints: Write checkpoints while training continues; None: where that is worth it.
            fork: Folder of a checkpoint of another run to start from; ignored with ``latest_checkpoint``.
            profile: Steps to record by torch's profiler: ``{"wait": 5, "warmup": 2, "active": 3}``; none with a test.

        Raises:
            ConfigError: an argument is wrong.
            TrainingError: training failed.
        """
        given = dict(locals())
        stated = {name: given[name] for name in vars(FitOptions())}
        stated |= {name: _stated_length(given[name]) for name in LENGTHS}
        if isinstance(profile, ProfiledSteps):
            stated["profile"] = vars(profile)
        arguments = Document(name="Trainer.fit", data={"fit": as_plain(stated)})
        options, problems = read_model(FitOptions, arguments, ("fit",))
        if problems:
            raise ConfigError(problems)
        run = script_run()
        if run is not None:  # how to start is as det-ds run says, whatever the script does
            run.trained = True
            test_mode, latest_checkpoint, fork = test_mode or run.test, run.latest_checkpoint, run.fork
            if run.measurement is not None:
                from determined_ds.train.loop.measure import keep_row, measure_throughput

                row = measure_throughput(self._trial, self._context, **vars(run.measurement))
                is_chief = self._context.distributed.rank == 0
                keep_row(run, row, is_chief=is_chief, was_stopped=row.status == STOPPED)  # by nothing else
                raise SystemExit(0)
        self.run(options, latest_checkpoint, test_mode=test_mode, fork=None if fork is None else Path(fork))

    def run(
        self, fit: FitOptions, latest_checkpoint: str | None, *, test_mode: bool, fork: Path | None
    ) -> None:
        """Train, by options that were read; see :meth:`fit`."""
        fit = completed(fit, self._context, test_mode=test_mode)
        if latest_checkpoint is not None:
            latest_checkpoint = find_checkpoint(self._context, latest_checkpoint)
        progress = make_progress(self._context.distributed.rank == 0, self._context._run_dir.metrics)
        Training(self._trial, self._context, fit, progress, test_mode=test_mode).train(
            latest_checkpoint, fork
        )


def of_hyperparameters(fit: FitOptions) -> FitOptions:
    """``hyperparameters.fit``, where a reporting period that is not stated is Determined's."""
    return replace(fit, reporting_period=fit.reporting_period or REPORTING_PERIOD)


def completed(fit: FitOptions, context: Any, *, test_mode: bool, states_length: bool = True) -> FitOptions:
    """The options, checked, with what a test and the experiment change; turns profiling on where they say so.

    Args:
        fit: As stated.
        context: Of the trial.
        test_mode: One batch is trained.
        states_length: Whether ``max_length`` is required; a script may state it otherwise.

    Raises:
        ConfigError: an option is not valid.
    """
    if test_mode:
        one = Length(unit="batches", value=1)
        fit = replace(fit, max_length=one, step_zero_validation=False, profile=None)
    if fit.max_length is None and states_length:
        fix = "state it: fit(max_length=Batch(200)), or hyperparameters.fit.max_length: {batches: 200}"
        message = "missing: the length of training is required"
        raise ConfigError(Problem(key="fit.max_length", message=message, fix=fix))
    policy = fit.checkpoint_policy
    if policy == "best" and not section_of(context, "searcher").get("metric"):
        if context.distributed.rank == 0:
            logger.warning(
                "warning: checkpoint_policy best has no searcher.metric to go by: every validation is kept"
            )
        policy = "all"
    if fit.profiling_enabled or section_of(context, "profiling").get("enabled"):
        context._core.profiler.on()
    return replace(fit, checkpoint_policy="none" if test_mode else policy)


def _stated_length(unit: Any) -> Any:
    """``{"batches": 3}`` for ``Batch(3)``, as hyperparameters state it; what is no unit stays, and is refused."""
    if isinstance(unit, timedelta):
        return {"seconds": unit.total_seconds()}
    if not isinstance(unit, pytorch.TrainUnit):
        return unit
    value = list(unit.value) if isinstance(unit.value, Iterable) else unit.value
    return {"epochs" if isinstance(unit, pytorch.Epoch) else "batches": value}
