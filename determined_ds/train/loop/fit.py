"""``Trainer``: Determined's ``deepspeed.Trainer`` by the same names, around this library's loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from determined import pytorch

from determined_ds.checkpoints.storage import find_checkpoint
from determined_ds.config.params import (
    ONLY_COUNTED,
    WARM_STARTS,
    Duration,
    FitOptions,
    Length,
    ProfiledSteps,
    read_profiled_steps,
)
from determined_ds.documents.document import Document
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.report.results import STOPPED
from determined_ds.train.loop.chief_display import make_progress
from determined_ds.train.loop.loop import TrainingLoop
from determined_ds.train.loop.measured_loop import measure_throughput
from determined_ds.train.loop.settings import LENGTHS, LoopOptions, section_of
from determined_ds.train.loop.step_measure import keep_row
from determined_ds.train.scripts.given_run import ScriptRun, cluster_info, script_run

logger = logging.getLogger("determined_ds")
POLICIES = ("best", "all", "none")


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
            profiling_enabled: As ``profiling.enabled`` of the experiment; off-cluster, to ``system_metrics.jsonl``.
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
        test_mode, latest_checkpoint, fork = self._start(test_mode, latest_checkpoint, fork)
        lengths = (max_length, validation_period, checkpoint_period, reporting_period)
        options = LoopOptions(
            lengths=dict(zip(LENGTHS, lengths, strict=True)),
            checkpoint_policy=checkpoint_policy,
            step_zero_validation=step_zero_validation,
            test_mode=test_mode,
            stop_on_nan=stop_on_nan,
            save_total_limit=save_total_limit,
            warm_start=warm_start,
            asynchronous_checkpoints=asynchronous_checkpoints,
            profile=None if test_mode else profiled_steps(profile),
        )
        self._fit(options, latest_checkpoint, fork, profiling_enabled)

    def _start(
        self, test_mode: bool, latest_checkpoint: str | None, fork: str | os.PathLike[str] | None
    ) -> tuple[bool, str | None, Path | None]:
        """How to start: as ``det-ds run`` says, whatever the script does."""
        if (run := script_run()) is not None:
            self._take_part(run)
            return test_mode or run.test, run.latest_checkpoint, run.fork
        return test_mode, latest_checkpoint, None if fork is None else Path(fork)

    def _take_part(self, run: ScriptRun) -> None:
        """Do what a script's run requests; where it is measured, its last step ends the script."""
        run.trained = True
        if run.measurement is None:
            return
        row = measure_throughput(self._trial, self._context, **vars(run.measurement))
        was_stopped = row.status == STOPPED  # by nothing else
        keep_row(run, row, is_chief=self._context.distributed.rank == 0, was_stopped=was_stopped)
        raise SystemExit(0)

    def _fit(
        self, options: LoopOptions, latest_checkpoint: str | None, fork: Path | None, profiles: bool
    ) -> None:
        if options.test_mode:
            lengths = {**options.lengths, "max_length": pytorch.Batch(1)}
            options = replace(options, lengths=lengths, step_zero_validation=False)
        _check_length(options.lengths["max_length"])
        _check_times(options.lengths)
        options = of_experiment(options, self._context)
        if profiles:
            self._context._core.profiler.on()
        if latest_checkpoint is not None:
            latest_checkpoint = find_checkpoint(self._context, latest_checkpoint)
        progress = make_progress(self._context.distributed.rank == 0, self._context._run_dir.metrics)
        TrainingLoop(self._trial, self._context, options, progress).run(latest_checkpoint, fork)


def of_experiment(options: LoopOptions, context: Any) -> LoopOptions:
    """The options with what the experiment says of the searcher; turns profiling on where it says so.

    Raises:
        ConfigError: an option is not valid.
    """
    info, searcher = cluster_info(), section_of(context, "searcher")
    policy = options.checkpoint_policy
    if policy not in POLICIES:
        raise _refused("checkpoint_policy", policy, "not a valid policy", "use best, all or none")
    if options.warm_start not in WARM_STARTS:
        fix = f"use {' or '.join(WARM_STARTS)}"
        raise _refused("warm_start", options.warm_start, "not a valid warm start", fix)
    if policy == "best" and not searcher.get("metric"):
        if context.distributed.rank == 0:
            logger.warning(
                "warning: checkpoint_policy best has no searcher.metric to go by: every validation is kept"
            )
        policy = "all"
    if section_of(context, "profiling").get("enabled"):
        context._core.profiler.on()
    return replace(
        options,
        checkpoint_policy="none" if options.test_mode else policy,
        metric=searcher.get("metric") or "",
        smaller_is_better=searcher.get("smaller_is_better") is not False,
        time_metric=str(searcher.get("time_metric") or ""),
        trial_id=info.trial.trial_id if info is not None and info.task_type == "TRIAL" else 0,
    )


def _check_length(max_length: pytorch.TrainUnit | None) -> None:
    if max_length is None:
        fix = "state it: fit(max_length=Batch(200)), or hyperparameters.fit.max_length: {batches: 200}"
        raise _refused("fit.max_length", None, "missing: the length of training is required", fix)
    value = max_length.value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fix = "use Batch(n) or Epoch(n) with n >= 1"
        raise _refused("fit.max_length", value, "must be an integer of at least 1", fix)


def _check_times(lengths: dict[str, Any]) -> None:
    for name, length in lengths.items():
        if not isinstance(length, timedelta):
            continue
        if name in ONLY_COUNTED:
            fix = "use Batch(n) or Epoch(n)"
            raise _refused(f"fit.{name}", str(length), f"cannot be a time: {ONLY_COUNTED[name]}", fix)
        if length <= timedelta():
            raise _refused(
                f"fit.{name}", str(length), "must be more than 0", "use e.g. timedelta(minutes=15)"
            )


def profiled_steps(given: ProfiledSteps | Mapping[str, int] | None) -> ProfiledSteps | None:
    """The argument ``profile`` of :meth:`Trainer.fit`.

    Raises:
        ConfigError: it is not valid.
    """
    if given is None or isinstance(given, ProfiledSteps):
        return given
    arguments = Document(name="Trainer.fit", data={"profile": as_plain(given)})
    steps, problems = read_profiled_steps(arguments, ("profile",))
    if problems:
        raise ConfigError(problems)
    return steps


def _refused(key: str, value: Any, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix))


def fit_arguments(fit: FitOptions) -> dict[str, Any]:
    """``hyperparameters.fit`` as keyword arguments of :meth:`Trainer.fit`."""
    arguments = {name: _train_unit(value) if name in LENGTHS else value for name, value in vars(fit).items()}
    if fit.reporting_period is None:
        del arguments["reporting_period"]
    return arguments


def _train_unit(length: Length | Duration | None) -> pytorch.TrainUnit | timedelta | None:
    if length is None:
        return None
    if isinstance(length, Duration):
        return timedelta(seconds=length.seconds)
    value = length.value if isinstance(length.value, int) else list(length.value)
    return (pytorch.Batch if length.unit == "batches" else pytorch.Epoch)(value)
