"""``DetCallback`` and ``Trainer``: transformers' Trainer on Determined, in place of ``determined.transformers``."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import determined as det
import torch
import transformers
from determined import core
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from determined_ds.checkpoints.files import finite, is_better
from determined_ds.cluster.core_context import cluster_core_context
from determined_ds.config.params import FitOptions, parse_hyperparameters
from determined_ds.documents.files import write_whole
from determined_ds.errors import NotFiniteError, TrainingError
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.process_group import join_process_group
from determined_ds.train.group.watch import leave_watch
from determined_ds.train.here import Here, report_to_tools, script_run
from determined_ds.train.loop.trainer import prove_checkpoint
from determined_ds.train.memory import memory_metrics, peak_bytes
from determined_ds.transformers.arguments import (
    accelerator_here,
    evaluates,
    is_chief,
    num_ranks,
    placed,
    trial_here,
)
from determined_ds.transformers.checkpoints import STATE, TrainerCheckpoints
from determined_ds.trial.returned import refused

logger = logging.getLogger("determined_ds")

# Metrics that are left out, as Determined's callback does: rounded, or of the speed of one evaluation.
SPEEDS = ("_runtime", "_per_second", "_compilation_time")
# Between steps, where anything may take its time. Of the process: it outlives a callback that the script drops.
_PATIENCE = contextlib.ExitStack()


@contextlib.contextmanager
def init(*, use_cpu: bool = False) -> Iterator[core.Context]:
    """Join the ranks, seed the generators with the trial's seed, and open Determined's core context.

    Args:
        use_cpu: Train on CPUs although there is a GPU.

    Yields:
        The core context for :class:`~determined_ds.transformers.DetCallback`. On a cluster it survives short outages
        of the master, and stops where the searcher stops the trial.
    """
    trial = trial_here()
    distributed = join_process_group(accelerator_here(use_cpu=use_cpu))
    if trial is not None:
        seed_everything(trial.seed)
    with contextlib.ExitStack() as stack:
        if trial is not None and trial.on_cluster:
            context = stack.enter_context(cluster_core_context(distributed))
            stack.enter_context(report_to_tools(context))
        else:
            context = stack.enter_context(core.init(distributed=distributed))
        yield context
        leave_watch()  # a rank that fails shows signs of life to its end


class DetCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Metrics, checkpoints, stops and resuming of a ``transformers.Trainer``, on a cluster and under ``det-ds run``.

    The arguments are those of ``determined.transformers.DetCallback`` (0.38.1). Where there is a checkpoint to resume
    from, it is in ``args.resume_from_checkpoint`` once the callback is made; give it to ``trainer.train``.

    Args:
        core_context: From :func:`determined_ds.transformers.init` or ``determined.core.init``.
        args: The arguments of the Trainer.
        filter_metrics: Report only metrics whose names hold one of these; None: all.
        user_data: Written into each checkpoint as ``my_data.json``.

    Raises:
        ConfigError: the experiment requests what the Trainer would not do.
    """

    def __init__(
        self,
        core_context: core.Context,
        args: transformers.TrainingArguments,
        filter_metrics: list[str] | None = None,
        user_data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.core_context, self._fit, searcher = core_context, FitOptions(checkpoint_policy="none"), {}
        self._trial, info = trial_here(), det.get_cluster_info()
        if self._trial is not None:
            _check_carried_out(self._trial, args)
            searcher = self._trial.searcher
            if self._trial.hyperparameters.get(("fit",)) is not None:
                self._fit = parse_hyperparameters(self._trial.hyperparameters).fit
        self._metric: str | None = searcher.get("metric")
        self._needed = {key: searcher[key] for key in ("metric", "time_metric") if key in searcher}
        self._smaller_is_better = searcher.get("smaller_is_better") is not False
        self._filter = None if filter_metrics is None else [*filter_metrics, *self._needed.values()]
        args.output_dir = placed(args.output_dir)
        of_trial = {} if self._trial is None or info is None else {"trial_id": info.trial.trial_id}
        self._checkpoints = TrainerCheckpoints(core_context, Path(args.output_dir), of_trial, user_data)
        self._is_chief = core_context.distributed.rank == 0
        self._is_training = self._is_stopping = False
        self._validation: dict[str, Any] = {}  # of the step at hand, until all data sets are evaluated
        self._resumed_step: int | None = None
        self._validated_step = self._trained_step = self._saved_step = -1
        self._best: float | None = None
        self._best_step: int | None = None
        self._running: tuple[int, float] | None = None  # since the last pause: its step, and when it ended
        if self._trial is not None and self._trial.latest_checkpoint is not None:
            folder = self._checkpoints.fetch(uuid := Path(self._trial.latest_checkpoint).name)
            args.resume_from_checkpoint = str(folder)
            state = transformers.TrainerState.load_from_json(str(folder / STATE))
            self._resumed_step = self._saved_step = state.global_step
            self._trained_step = self._validated_step = state.global_step
            for each in state.log_history:
                self._note_best(each, each.get("step"))
            logger.info("resuming from checkpoint %s, step %d", uuid, state.global_step)

    # ------------------------------------------------------------------------------- of transformers' Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that training resumes where it was stopped."""
        if self._resumed_step not in (None, state.global_step):
            raise TrainingError(
                f"training begins at step {state.global_step}, and the checkpoint is of step {self._resumed_step}\n"
                "  fix: write trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            )
        self._is_training, self._is_stopping = True, False
        given, run = getattr(args, "hf_deepspeed_config", None), script_run()
        if (
            given is not None and self._is_chief and run is not None
        ):  # what it is comes into the closing block
            write_whole(run.there.deepspeed_config, json.dumps(given.config, indent=2, default=str) + "\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the evaluation before the step."""
        _PATIENCE.close()
        self._report_validation()
        self._running = self._running or (state.global_step, time.perf_counter())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is a sign of life, as is a batch of an evaluation."""
        HEART.beat()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Progress, and whether to stop; asked at every step, a collective."""
        step, last = state.global_step, max(1, state.max_steps)
        HEART.step(step)
        if self._is_chief and 100 * step // last > 100 * (step - 1) // last:
            self.core_context.train.report_progress(min(1.0, step / last))
        # A finished trial that acknowledged a stop would be started again by the master.
        if step < state.max_steps:
            preempt, distributed = self.core_context.preempt, self.core_context.distributed
            if preempt._preempt_mode is core.PreemptMode.WorkersAskChief:
                stops = preempt.should_preempt()
            else:  # a rank answers for itself alone: rank 0 does for all
                stops = distributed.broadcast(bool(self._is_chief and preempt.should_preempt()))
            if stops:
                self._is_stopping = control.should_training_stop = True
        # Of what is saved, the loss is known before: it must be finite, and a resumed run counts from here.
        control.should_log = control.should_log or control.should_save or control.should_training_stop
        if control.should_evaluate or control.should_save:
            self._be_patient()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At the end, evaluate and save what was not; in the middle of a pass, only save."""
        self._be_patient()
        self._report_validation()
        step = state.global_step
        if self._is_stopping and state.epoch != int(state.epoch):  # this pass is trained to its end later
            control.should_evaluate = control.should_save = False
        is_end = control.should_training_stop or step >= state.max_steps
        if is_end and not self._is_stopping and step > self._validated_step and evaluates(args):
            control.should_evaluate = True
        if is_end and (step > self._saved_step or (control.should_evaluate and self._is_stopping)):
            control.should_save = True
        control.should_log = control.should_log or control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report metrics of training; keep those of evaluations until all of them are there."""
        logs, step, kept = logs or {}, state.global_step, self._filter
        metrics: dict[str, Any] = {"batches": step, "epochs": state.epoch}
        for name, value in logs.items():
            is_skipped = name == "grad_norm" and not math.isfinite(value)  # of a step that was skipped
            is_wanted = kept is None or any(part in name for part in kept)
            if is_wanted and not is_skipped and name != "epoch" and not name.endswith(SPEEDS):
                metrics[name] = value
        if any(name.startswith("eval_") for name in logs):
            self._validation.update(metrics)
            if not self._is_training:
                self._report_validation()
        elif logs and step > self._trained_step and not any(name.startswith("test_") for name in logs):
            self._trained_step = step
            self._check_finite("loss", logs.get("loss"), step)
            peaks = self.core_context.distributed.allgather(peak_bytes(args.device))
            if self._is_chief:
                if self._running is not None and step > self._running[0]:
                    samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
                    samples *= step - self._running[0]
                    metrics["samples_per_second"] = samples / (time.perf_counter() - self._running[1])
                metrics |= memory_metrics(peaks)
                self.core_context.train.report_training_metrics(steps_completed=step, metrics=metrics)
        self._running = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Decide whether the evaluated weights are saved; a collective."""
        if self._is_training and self._metric in (metrics or {}):
            self._check_finite(self._metric, metrics[self._metric], state.global_step)
            is_best, policy = self._note_best(metrics, state.global_step), self._fit.checkpoint_policy
            wanted = policy == "all" or (policy == "best" and is_best)
            if self.core_context.distributed.broadcast(wanted) and state.global_step > self._saved_step:
                control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store what the Trainer has written."""
        self._report_validation()
        self._saved_step = state.global_step
        self._checkpoints.store(state.global_step, args.save_total_limit, self._best_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what is left."""
        self._report_validation()
        self._is_training = False

    # --------------------------------------------------------------------------------------------- its own

    def _be_patient(self) -> None:
        """Until the next step anything may take its time: a metric that is computed, a checkpoint, the script's end."""
        _PATIENCE.close()
        _PATIENCE.enter_context(HEART.patiently())

    def _report_validation(self) -> None:
        """Report the evaluations of one step, of one data set or several, once."""
        metrics, self._validation = self._validation, {}
        if not metrics or (self._is_stopping and not self._is_training):
            return  # what a script evaluates after a stop belongs to the training that is resumed
        step = metrics["batches"]
        if step <= self._validated_step:
            return
        self._validated_step = step
        for key, name in self._needed.items():
            if name not in metrics:
                names = ", ".join(sorted(metrics.keys() - {"batches", "epochs"}))
                fix = f"use one of {names}, or return it from compute_metrics"
                message = "is not among the metrics of an evaluation"
                raise refused(f"searcher.{key}", message, fix, "searcher-metric", value=name)
        if self._is_chief:
            self.core_context.train.report_validation_metrics(steps_completed=step, metrics=metrics)

    def _note_best(self, metrics: Mapping[str, Any], step: int | None) -> bool:
        value = finite(metrics.get(self._metric)) if self._metric else None
        if not is_better(value, self._best, smaller_is_better=self._smaller_is_better):
            return False
        self._best, self._best_step = value, step
        return True

    def _check_finite(self, name: str | None, value: Any, step: int) -> None:
        if self._fit.stop_on_nan and value is not None and not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {float(value)} at step {step}: nothing is saved of it; lower the learning rate, "
                "or set hyperparameters.fit.stop_on_nan: false"
            )


def _check_carried_out(trial: Here, args: Any) -> None:
    """Refuse what the experiment requests and the Trainer would not do."""
    run, metric = trial.run, trial.searcher.get("metric")
    if run is not None and run.measurement is not None:
        message, fix = "the steps of transformers' Trainer are not measured", "measure a trial, or a session"
        raise refused("--measure", message, fix, "measure", value=run.measurement.steps)
    if run is not None and run.fork is not None:
        message = "a run of transformers does not start from another's checkpoint by itself"
        fix = "remove it, and give that checkpoint's folder checkpoint-N to from_pretrained"
        raise refused("searcher.source_checkpoint_uuid", message, fix, "hf-fork", value=str(run.fork))
    if args.world_size != num_ranks():
        # Without a GPU, accelerate takes each rank for the only one unless CPUs are requested.
        message = f"transformers sees {args.world_size} of {num_ranks()} ranks: each would train on all data"
        fix = "on CPUs, write TrainingArguments(use_cpu=True)"
        raise refused("ranks", message, fix, "ranks", value=args.world_size)
    if metric and not (metric.startswith("eval_") and evaluates(args)):
        message = "transformers reports metrics of evaluations as eval_NAME, and nothing else"
        fix = "write eval_NAME, and eval_strategy or hyperparameters.fit.validation_period: {batches: N}"
        raise refused("searcher.metric", message, fix, "searcher-metric", value=metric)
    own = [name for name in ("global_batch_size", "fit") if trial.hyperparameters.get((name,)) is not None]
    if own and getattr(args, "resolved", None) is None and is_chief():
        words = "warning: hyperparameters.%s: not read by transformers' own TrainingArguments. fix: import them from"
        logger.warning(f"{words} determined_ds.transformers", own[0])


class ResumingTrainer:
    """What makes a class of trainers resume by itself and take part in ``--test``; put it before that class."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from ``args.resume_from_checkpoint`` where nothing else is said; under ``--test``, prove it.

        The proof loads the stored checkpoint over scrambled weights, and evaluates one batch to the same number.
        """
        trainer: Any = self
        options, data, run = trainer.args, trainer.eval_dataset, script_run()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = options.resume_from_checkpoint
        is_test = run is not None and run.test
        if is_test and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            one_batch = range(min(len(data), options.per_device_eval_batch_size * options.world_size))
            take = data.select if hasattr(data, "select") else partial(torch.utils.data.Subset, data)
            trainer.eval_dataset = take(one_batch)
        output = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        if run is None or not is_test:
            return output
        callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, DetCallback)]
        if not callbacks or not trainer.is_deepspeed_enabled:
            message = "needs a DetCallback and a DeepSpeed JSON, to store a checkpoint and load it back"
            fix = "write Trainer(..., callbacks=[DetCallback(core_context, args)])"
            raise refused("--test", message, fix, "test")

        def load() -> None:
            with callbacks[0]._checkpoints.newest() as folder:
                deepspeed_load_checkpoint(trainer.model_wrapped, str(folder))

        context = SimpleNamespace(models=[trainer.model_wrapped], device=options.device)
        same = prove_checkpoint(context, lambda: trainer.evaluate().get("eval_loss"), load)
        run.trained = True
        if is_chief():
            print(f"test passed: trained, validated, saved, loaded back, validated to {same}", flush=True)
        return output


class Trainer(ResumingTrainer, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, resuming from ``args.resume_from_checkpoint``; ``det-ds run --test`` needs it."""


class Seq2SeqTrainer(ResumingTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer``, in the same way."""
