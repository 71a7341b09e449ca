"""``Trainer``: Determined's ``deepspeed.Trainer`` by the same names, around our loop."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import determined as det
from determined import pytorch

from determined_ds.config.hyperparameters import WARM_STARTS, FitOptions, Length
from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.loop.loop import LoopOptions, TrainingLoop
from determined_ds.runtime.loop.progress import make_progress

logger = logging.getLogger("determined_ds")


class Trainer:
    """Trains a ``DeepSpeedTrial``.

    Args:
        trial: The trial, its engines wrapped.
        context: From :func:`determined_ds.open_context`.
    """

    def __init__(self, trial: Any, context: Any) -> None:
        self._trial = trial
        self._context = context
        info = det.get_cluster_info()
        self._info = info if info is not None and info.task_type == "TRIAL" else None

    def fit(
        self,
        checkpoint_period: pytorch.TrainUnit | None = None,
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
        fork: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train. The arguments are those of ``determined.pytorch.deepspeed.Trainer.fit`` (0.38.1), and four more.

        Periods count from the start of training, whether this process trained it or one before.

        Args:
            checkpoint_period: ``Batch(n)``, ``Epoch(n)``, or of a list of numbers; None: only at the end.
            validation_period: The same.
            max_length: ``Batch(n)`` or ``Epoch(n)``, n >= 1: just so much is trained.
            reporting_period: The same as a period.
            checkpoint_policy: ``best``, ``all`` or ``none``: which validations are followed by a checkpoint.
                ``best`` goes by ``searcher.metric``, off-cluster too; without one it is ``all``.
            latest_checkpoint: Uuid of the checkpoint to go on from.
            step_zero_validation: Validate before the first batch.
            test_mode: One batch trained, one validated, one checkpoint saved, loaded back, validated again.
            profiling_enabled: Determined's system metrics: on a cluster its master shows them, off it they are
                written to ``system_metrics.jsonl``. The experiment's ``profiling.enabled`` means the same.
            stop_on_nan: Stop at a loss, or a validation of ``searcher.metric``, that is not finite, before anything
                is saved of it. Where it is False, such a validation is never the best.
            save_total_limit: Checkpoints to keep at most, >= 1, the best and the newest always; None: all.
            warm_start: What is taken of a checkpoint of another trial, which ``fork`` names, or on a cluster
                ``latest_checkpoint``: ``weights`` alone, whatever slots and ZeRO stage wrote them, or ``all``: the
                optimizer, the schedule and the loss scale too. Callbacks, data and the batch count begin anew.
            fork: Folder of a checkpoint of another run, to begin with; not where ``latest_checkpoint`` is given.

        Raises:
            ConfigError: an argument is wrong.
            TrainingError: training failed.
        """
        max_length = pytorch.Batch(1) if test_mode else self._checked_length(max_length)
        metric, smaller_is_better = self._searcher()
        if checkpoint_policy not in ("best", "all", "none"):
            raise _refuse("checkpoint_policy", checkpoint_policy, "no such policy", "use best, all or none")
        if warm_start not in WARM_STARTS:
            raise _refuse(
                "warm_start", warm_start, "not a valid warm start", f"use {' or '.join(WARM_STARTS)}"
            )
        if checkpoint_policy == "best" and not metric:
            logger.warning(
                "warning: checkpoint_policy best has no searcher.metric to go by: every validation is kept"
            )
            checkpoint_policy = "all"
        if profiling_enabled or section_of(self._context, "profiling").get("enabled"):
            self._context._core.profiler.on()
        options = LoopOptions(
            lengths={
                "max_length": max_length,
                "validation_period": validation_period,
                "checkpoint_period": checkpoint_period,
                "reporting_period": reporting_period,
            },
            checkpoint_policy="none" if test_mode else checkpoint_policy,
            metric=metric,
            smaller_is_better=smaller_is_better,
            step_zero_validation=step_zero_validation and not test_mode,
            test_mode=test_mode,
            stop_on_nan=stop_on_nan,
            save_total_limit=save_total_limit,
            warm_start=warm_start,
            trial_id=self._info.trial.trial_id if self._info else 0,
            time_metric=str(section_of(self._context, "searcher").get("time_metric") or ""),
        )
        progress = make_progress(self._context.distributed.rank == 0)
        TrainingLoop(self._trial, self._context, options, progress).run(
            latest_checkpoint, None if fork is None else Path(fork)
        )

    def _searcher(self) -> tuple[str, bool]:
        searcher = section_of(self._context, "searcher")
        return searcher.get("metric") or "", searcher.get("smaller_is_better") is not False

    def _checked_length(self, max_length: pytorch.TrainUnit | None) -> pytorch.TrainUnit:
        if max_length is None:
            fix = "state it: fit(max_length=Batch(200)), or hyperparameters.fit.max_length: {batches: 200}"
            raise _refuse("fit.max_length", None, "missing: nothing says how long to train", fix)
        value = max_length.value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            fix = "use Batch(n) or Epoch(n) with n >= 1"
            raise _refuse("fit.max_length", value, "must be an integer of at least 1", fix)
        return max_length


def section_of(context: Any, name: str) -> dict[str, Any]:
    """A section of the experiment's configuration, empty where there is none."""
    try:
        return dict(context.get_experiment_config().get(name) or {})
    except ValueError:  # Determined's: no experiment configuration was given
        return {}


def _refuse(key: str, value: Any, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix))


def fit_arguments(fit: FitOptions) -> dict[str, Any]:
    """``hyperparameters.fit`` as keyword arguments of :meth:`Trainer.fit`."""
    arguments: dict[str, Any] = {
        "max_length": _train_unit(fit.max_length),
        "validation_period": _train_unit(fit.validation_period),
        "checkpoint_period": _train_unit(fit.checkpoint_period),
        "checkpoint_policy": fit.checkpoint_policy,
        "step_zero_validation": fit.step_zero_validation,
        "profiling_enabled": fit.profiling_enabled,
        "stop_on_nan": fit.stop_on_nan,
        "save_total_limit": fit.save_total_limit,
        "warm_start": fit.warm_start,
    }
    if fit.reporting_period is not None:
        arguments["reporting_period"] = _train_unit(fit.reporting_period)
    return arguments


def _train_unit(length: Length | None) -> pytorch.TrainUnit | None:
    if length is None:
        return None
    value = length.value if isinstance(length.value, int) else list(length.value)
    return (pytorch.Batch if length.unit == "batches" else pytorch.Epoch)(value)
