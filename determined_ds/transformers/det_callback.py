"""``DetCallback``: transformers' Trainer on Determined, in place of that of ``determined.transformers``."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import determined as det
import torch
import transformers
from determined import core

from determined_ds.config.params import FitOptions, parse_hyperparameters
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, NotFiniteError, Problem, TrainingError
from determined_ds.rundir.best import finite, is_better
from determined_ds.rundir.heartbeat import HEART
from determined_ds.train.rank_memory import RankMemory, memory_metrics, rank_memory
from determined_ds.transformers.checkpoints import TrainerCheckpoints
from determined_ds.transformers.contradictions import (
    eval_strategy,
    hyperparameter_problems,
    reported_twice,
    searcher_problems,
)
from determined_ds.transformers.here import TrialHere, missing_ranks, placed, trial_here
from determined_ds.transformers.hf_arguments import ReconciledArguments
from determined_ds.transformers.in_place_of_bars import panel_for_trainer
from determined_ds.transformers.measured_training import measured_training
from determined_ds.transformers.profiled_training import ProfiledTraining
from determined_ds.transformers.reported import TRAINING, VALIDATION, Stopwatch, group_of, reported
from determined_ds.transformers.stop_question import StopQuestion
from determined_ds.trial.comms_logger import correct_comms_logger
from determined_ds.trial.engine import print_communication

logger = logging.getLogger("determined_ds")

# Between steps, where anything may take its time. Of the process: it outlives a callback that the script drops.
_PATIENCE = contextlib.ExitStack()


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
        ConfigError: the arguments and the experiment contradict each other.
    """

    def __init__(
        self,
        core_context: core.Context,
        args: transformers.TrainingArguments,
        filter_metrics: list[str] | None = None,
        user_data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.core_context = core_context
        self.user_data = user_data
        self.info = det.get_cluster_info()
        self._trial = trial_here()
        searcher = {} if self._trial is None else self._trial.searcher
        self.searcher_metric: str | None = searcher.get("metric") or None
        self.time_metric: str | None = searcher.get("time_metric") or None
        self._smaller_is_better = searcher.get("smaller_is_better") is not False
        self.filter_metrics = filter_metrics
        if filter_metrics is not None:
            self.filter_metrics = [*filter_metrics, *filter(None, (self.searcher_metric, self.time_metric))]
        self._fit = FitOptions() if self._trial is None else self._checked(self._trial, args)
        args.output_dir = placed(args.output_dir)
        trial_id = None if self._trial is None or self.info is None else self.info.trial.trial_id
        self._checkpoints = TrainerCheckpoints(
            core_context, args.output_dir, trial_id=trial_id, user_data=user_data
        )
        self._is_chief = core_context.distributed.rank == 0
        self._stop = StopQuestion(core_context)
        self._resumed_steps: int | None = None
        self._begin()
        run = None if self._trial is None else self._trial.run
        self._measured = measured_training(run, core_context, args)
        self._profiled: ProfiledTraining | None = None
        self._progress = panel_for_trainer(run, is_chief=self._is_chief)
        if self._trial is not None:
            self._resume(self._trial, args)

    def _begin(self) -> None:
        """What is known of a training that is about to begin."""
        self._is_training = self._is_stopping = False
        self._validation: dict[str, Any] = {}
        self._validated: set[str] = set()  # names of metrics that were reported of the step at hand
        self._validated_step = self._trained_step = self._saved_step = -1
        self._best: float | None = None
        self._best_steps: int | None = None
        self._percent = 0
        self._watch = Stopwatch()
        self._memory: list[RankMemory] = []

    def _checked(self, trial: TrialHere, args: Any) -> FitOptions:
        problems = [*searcher_problems(trial.searcher, args), *reported_twice(trial.hyperparameters, args)]
        if unseen := missing_ranks(
            args.world_size, "on CPUs, write TrainingArguments(use_cpu=True), or --use_cpu"
        ):
            problems.append(unseen)
        if not isinstance(args, ReconciledArguments):
            problems += hyperparameter_problems(trial.hyperparameters, args)
        if problems:
            raise ConfigError(problems)
        states_fit = trial.hyperparameters.get(("fit",)) is not None
        fit = parse_hyperparameters(trial.hyperparameters).fit
        if fit.profiling_enabled:
            self.core_context.profiler.on()
        return fit if states_fit else FitOptions(checkpoint_policy="none")

    def _resume(self, trial: TrialHere, args: Any) -> None:
        if trial.run is not None and trial.run.fork is not None:
            key, value = "searcher.source_checkpoint_uuid", str(trial.run.fork)
            message = "a run of transformers does not start from another's checkpoint by itself"
            fix = "remove it, and give that checkpoint's folder checkpoint-N to from_pretrained"
            raise ConfigError(Problem(key=key, value=value, message=message, fix=fix, code="hf-fork"))
        if trial.latest_checkpoint is None:
            return
        folder = self._checkpoints.fetch(trial.latest_checkpoint)
        args.resume_from_checkpoint = str(folder)
        state = transformers.TrainerState.load_from_json(str(folder / "trainer_state.json"))
        self._resumed_steps = self._saved_step = state.global_step
        self._trained_step = self._validated_step = state.global_step
        for each in state.log_history:
            self._note_best(each, each.get("step"))
        logger.info("resuming from checkpoint %s, step %d", trial.latest_checkpoint, state.global_step)

    @contextlib.contextmanager
    def stored(self) -> Iterator[Path]:
        """The newest checkpoint as it is stored: its ``checkpoint-N``; a collective."""
        with self._checkpoints.newest() as folder:
            yield folder

    # ------------------------------------------------------------------------------- of transformers' Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that training resumes where it was stopped."""
        if self._resumed_steps not in (None, state.global_step):
            message = (
                f"training begins at step {state.global_step}, and the checkpoint is of step {self._resumed_steps}: "
                "write trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            )
            raise TrainingError(message)
        self._is_training, self._is_stopping = True, False
        self._watch.restart()
        given = getattr(args, "hf_deepspeed_config", None)
        if self._is_chief and given is not None and self._trial is not None and self._trial.run is not None:
            path = self._trial.run.there.deepspeed_config
            write_whole(path, json.dumps(given.config, indent=2, default=str) + "\n")
        if self._measured is not None:
            self._measured.begin(args, state, model=kwargs["model"], optimizer=kwargs["optimizer"])
        self._profiled = self._profiling(args, kwargs["model"])
        if getattr(args, "hf_deepspeed_config", None) is not None:
            correct_comms_logger()
        self._progress.start(
            total=state.max_steps,
            done=state.global_step,
            metric=self.searcher_metric or "",
            smaller_is_better=self._smaller_is_better,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the evaluation before the step."""
        if self._profiled is not None:
            self._profiled.taken()
        _PATIENCE.close()
        self._report_validation(state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is a sign of life, as is a batch of an evaluation."""
        HEART.beat()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See :meth:`on_substep_end`."""
        HEART.beat()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Progress, and whether to stop; asked at every step."""
        if self._measured is not None:
            self._measured.stop_step()
        if self._profiled is not None:
            self._profiled.end_step(state.global_step)
        self._watch.step()
        self._progress.step(state.global_step)
        HEART.step(state.global_step)
        self._report_progress(state.global_step / max(1, state.max_steps))
        if state.global_step < state.max_steps and self._stop.ask():
            self._is_stopping = control.should_training_stop = True
        if self._measured is not None:
            self._measured.allow(state, control)
            return
        # Of what is saved, the loss is known before: it must be finite, and a resumed run counts from here.
        control.should_log = control.should_log or control.should_save or control.should_training_stop
        if control.should_log:
            self._memory = self.core_context.distributed.allgather(rank_memory(args.device))
        if control.should_evaluate or control.should_save:
            self._be_patient()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At the end, evaluate and save what was not; in the middle of a pass, only save."""
        self._be_patient()
        if self._measured is not None:
            self._measured.allow(state, control)
            return
        self._report_validation(state)
        step = state.global_step
        in_midst = self._is_stopping and state.epoch != int(state.epoch)
        if in_midst:  # this pass is trained to its end later
            control.should_evaluate = control.should_save = False
        is_end = control.should_training_stop or step >= state.max_steps
        if is_end and not self._is_stopping and step > self._validated_step and eval_strategy(args) != "no":
            control.should_evaluate = True
        if is_end and (step > self._saved_step or (control.should_evaluate and self._is_stopping)):
            control.should_save = True
        if control.should_save:
            control.should_log = True

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Report metrics of training; keep those of evaluations until all of them are there."""
        group = group_of(logs or {})
        metrics = reported(logs or {}, self.filter_metrics, step=state.global_step, epoch=state.epoch)
        if group == VALIDATION:
            self._validation.update(metrics)
            if not self._is_training:
                self._report_validation(state)
        elif group == TRAINING and logs and state.global_step > self._trained_step:
            self._trained_step = state.global_step
            self._check_finite("loss", logs.get("loss"), state)
            if self._measured is None:
                self._report_training(args, state, metrics)
            elif "loss" in logs:
                self._measured.end_step(logs["loss"])
        self._not_training()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Decide whether the evaluated weights are saved."""
        metrics = metrics or {}
        if self._is_training and self.searcher_metric in metrics:
            self._check_finite(self.searcher_metric, metrics[self.searcher_metric], state)
            is_best = self._note_best(metrics, state.global_step)
            policy = self._fit.checkpoint_policy
            wanted = policy == "all" or (policy == "best" and is_best)
            # One answer for all ranks, since a checkpoint is a collective.
            if self.core_context.distributed.broadcast(wanted) and state.global_step > self._saved_step:
                control.should_save = True
        self._not_training()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store what the Trainer has written."""
        self._report_validation(state)
        self._saved_step = state.global_step
        self._checkpoints.store(state.global_step)
        self._checkpoints.prune(args.save_total_limit, self._best_steps)
        self._not_training()
        self._progress.checkpoints(state.global_step, None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what is left."""
        self._stop.forget()
        if self._profiled is not None:
            self._profiled.close()
        print_communication()
        self._report_validation(state)
        self._progress.stop()
        self._is_training = False
        if self._measured is not None:
            self._measured.end(was_stopped=self._is_stopping)

    def _profiling(self, args: Any, model: Any) -> ProfiledTraining | None:
        """What records steps; None where none are to be recorded."""
        run = None if self._trial is None else self._trial.run
        measured = run is not None and run.measurement is not None
        steps = run.measurement.profile if measured else self._fit.profile  # type: ignore[union-attr]
        if steps is None or (run is not None and run.test):
            return None
        run_dir = None if run is None else run.run_dir
        return ProfiledTraining(steps, self.core_context, args, run_dir=run_dir, model=model)

    def _not_training(self) -> None:
        """What was done since the last step is not training's time."""
        self._watch.restart()
        if self._profiled is not None:
            self._profiled.begin_again()

    def _be_patient(self) -> None:
        """Until the next step anything may take its time: a metric that is computed, a checkpoint, the script's end."""
        _PATIENCE.close()
        _PATIENCE.enter_context(HEART.patiently())

    # ------------------------------------------------------------------------------------------ reports

    def _report_progress(self, progress: float) -> None:
        percent = int(progress * 100)
        if self._is_chief and percent > self._percent:
            self._percent = percent
            self.core_context.train.report_progress(min(1.0, progress))

    def _report_training(self, args: Any, state: Any, metrics: dict[str, Any]) -> None:
        steps_per_s = self._watch.take()
        if not self._is_chief:
            return
        if steps_per_s is not None:
            samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            metrics["samples_per_second"] = steps_per_s * samples
        if self._memory:
            metrics.update(memory_metrics(self._memory))
        self.core_context.train.report_training_metrics(steps_completed=state.global_step, metrics=metrics)
        self._progress.report(TRAINING, state.global_step, metrics)

    def _report_validation(self, state: Any) -> None:
        """Report the evaluations of one step, of one data set or several, each metric once."""
        metrics, self._validation = self._validation, {}
        if not metrics or (self._is_stopping and not self._is_training):
            return  # what a script evaluates after a stop belongs to the training that is resumed
        step = metrics["batches"]
        if step < self._validated_step:
            return
        if step > self._validated_step:
            self._validated, self._validated_step = set(), step
            self._check_metrics(metrics)
        metrics = {name: value for name, value in metrics.items() if name not in self._validated}
        self._validated |= set(metrics)
        if self._is_chief and metrics:
            self.core_context.train.report_validation_metrics(steps_completed=step, metrics=metrics)
            self._progress.report(VALIDATION, step, metrics)

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        """The searcher needs these two.

        Raises:
            ConfigError: one is missing.
        """
        problems = []
        for key, name in (
            ("searcher.metric", self.searcher_metric),
            ("searcher.time_metric", self.time_metric),
        ):
            if name is not None and name not in metrics:
                names = [each for each in metrics if each not in ("batches", "epochs")]
                message = "is not among the metrics of an evaluation"
                fix = f"use one of {', '.join(names)}, or return it from compute_metrics"
                problems.append(
                    Problem(key=key, value=name, message=message, fix=fix, code="searcher-metric")
                )
        if problems:
            raise ConfigError(problems)

    def _note_best(self, metrics: dict[str, Any], steps: int | None) -> bool:
        value = finite(metrics.get(self.searcher_metric)) if self.searcher_metric else None
        if not is_better(value, self._best, smaller_is_better=self._smaller_is_better):
            return False
        self._best, self._best_steps = value, steps
        return True

    def _check_finite(self, name: str | None, value: Any, state: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.item()
        if self._fit.stop_on_nan and isinstance(value, float) and not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {value} at step {state.global_step}: nothing is saved of it; lower the learning rate, "
                "or set hyperparameters.fit.stop_on_nan: false"
            )
