"""``DetCallback`` and ``Trainer``: transformers' Trainer on Determined, in place of ``determined.transformers``."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
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
from determined_ds.config.params import FitOptions, Hyperparameters, parse_hyperparameters
from determined_ds.documents.files import write_whole
from determined_ds.errors import ConfigError, NotFiniteError, Problem, TrainingError
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.process_group import join_process_group
from determined_ds.train.group.watch import leave_watch
from determined_ds.train.here import Here, report_to_tools, script_run
from determined_ds.train.loop.trainer import prove_checkpoint
from determined_ds.train.memory import memory_metrics, peak_bytes
from determined_ds.transformers.arguments import accelerator_here, is_chief, num_ranks, placed, trial_here
from determined_ds.transformers.checkpoints import STATE, TrainerCheckpoints

logger = logging.getLogger("determined_ds")

EVALUATED, TESTED = "eval_", "test_"  # how names of metrics begin
# Left out, as Determined's callback does: rounded, or of the speed of one evaluation.
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
    devices = accelerator_here(use_cpu=use_cpu)
    distributed = join_process_group(devices)
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
        self.core_context, self.user_data = core_context, user_data
        self.info, self._trial, self._fit = (
            det.get_cluster_info(),
            trial_here(),
            FitOptions(checkpoint_policy="none"),
        )
        searcher, trial_id = {}, None
        if self._trial is not None:
            searcher = self._trial.searcher
            trial_id = self.info.trial.trial_id if self.info is not None else None
            own = parse_hyperparameters(self._trial.hyperparameters)
            if problems := [*_not_done(self._trial, own, args)]:
                raise ConfigError(problems)
            if self._trial.hyperparameters.get(("fit",)) is not None:
                self._fit = own.fit
        self.searcher_metric: str | None = searcher.get("metric") or None
        self.time_metric: str | None = searcher.get("time_metric") or None
        self._smaller_is_better = searcher.get("smaller_is_better") is not False
        self.filter_metrics = filter_metrics
        if filter_metrics is not None:
            self.filter_metrics = [*filter_metrics, *filter(None, (self.searcher_metric, self.time_metric))]
        if self._fit.profiling_enabled:
            core_context.profiler.on()
        args.output_dir = placed(args.output_dir)
        self._checkpoints = TrainerCheckpoints(core_context, args.output_dir, trial_id, user_data)
        self._is_chief = core_context.distributed.rank == 0
        self._is_training = self._is_stopping = False
        self._validation: dict[str, Any] = {}  # of the step at hand, until all data sets are evaluated
        self._validated: set[str] = set()  # names of metrics that were reported of the step at hand
        self._resumed_step: int | None = None
        self._validated_step = self._trained_step = self._saved_step = -1
        self._best: float | None = None
        self._best_step: int | None = None
        # Seconds and number of the steps since the last report, without evaluations, checkpoints and reports.
        self._step_s, self._steps, self._since = 0.0, 0, 0.0
        self._is_paused = True
        if self._trial is not None and self._trial.latest_checkpoint is not None:
            uuid = Path(self._trial.latest_checkpoint).name
            folder = self._checkpoints.fetch(uuid)
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
        given = getattr(args, "hf_deepspeed_config", None)
        if given is not None and self._is_chief and self._trial is not None and self._trial.run is not None:
            path = self._trial.run.there.deepspeed_config
            write_whole(path, json.dumps(given.config, indent=2, default=str) + "\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the evaluation before the step."""
        _PATIENCE.close()
        self._report_validation()
        if self._is_paused:
            self._is_paused, self._since = False, time.perf_counter()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is a sign of life, as is a batch of an evaluation."""
        HEART.beat()

    on_prediction_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Progress, and whether to stop; asked at every step."""
        now = time.perf_counter()
        self._step_s, self._steps, self._since = self._step_s + now - self._since, self._steps + 1, now
        step, last = state.global_step, max(1, state.max_steps)
        HEART.step(step)
        if self._is_chief and 100 * step // last > 100 * (step - 1) // last:
            self.core_context.train.report_progress(min(1.0, step / last))
        # A finished trial that acknowledged a stop would be started again by the master.
        if step < state.max_steps and self._should_stop():
            self._is_stopping = control.should_training_stop = True
        # Of what is saved, the loss is known before: it must be finite, and a resumed run counts from here.
        control.should_log = control.should_log or control.should_save or control.should_training_stop
        if control.should_evaluate or control.should_save:
            self._be_patient()
        self._is_paused = control.should_log or control.should_evaluate

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At the end, evaluate and save what was not; in the middle of a pass, only save."""
        self._be_patient()
        self._report_validation()
        step = state.global_step
        if self._is_stopping and state.epoch != int(state.epoch):  # this pass is trained to its end later
            control.should_evaluate = control.should_save = False
        is_end = control.should_training_stop or step >= state.max_steps
        if is_end and not self._is_stopping and step > self._validated_step and _evaluates(args):
            control.should_evaluate = True
        if is_end and (step > self._saved_step or (control.should_evaluate and self._is_stopping)):
            control.should_save = True
        control.should_log = control.should_log or control.should_save

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Report metrics of training; keep those of evaluations until all of them are there."""
        logs, step, kept = logs or {}, state.global_step, self.filter_metrics
        metrics: dict[str, Any] = {"batches": step, "epochs": state.epoch}
        for name, value in logs.items():
            is_skipped = name == "grad_norm" and not math.isfinite(value)  # of a step that was skipped
            is_wanted = kept is None or any(part in name for part in kept)
            if is_wanted and not is_skipped and name != "epoch" and not name.endswith(SPEEDS):
                metrics[name] = value
        if any(name.startswith(EVALUATED) for name in logs):
            self._validation.update(metrics)
            if not self._is_training:
                self._report_validation()
        elif logs and step > self._trained_step and not any(name.startswith(TESTED) for name in logs):
            self._trained_step = step
            self._check_finite("loss", logs.get("loss"), step)
            peaks = self.core_context.distributed.allgather(peak_bytes(args.device))
            if self._is_chief:
                if self._step_s:
                    samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
                    metrics["samples_per_second"] = samples * self._steps / self._step_s
                metrics |= memory_metrics(peaks)
                self.core_context.train.report_training_metrics(steps_completed=step, metrics=metrics)
            self._step_s, self._steps = 0.0, 0

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Decide whether the evaluated weights are saved."""
        metrics = metrics or {}
        if self._is_training and self.searcher_metric in metrics:
            self._check_finite(self.searcher_metric, metrics[self.searcher_metric], state.global_step)
            is_best = self._note_best(metrics, state.global_step)
            policy = self._fit.checkpoint_policy
            wanted = policy == "all" or (policy == "best" and is_best)
            # One answer for all ranks, since a checkpoint is a collective.
            if self.core_context.distributed.broadcast(wanted) and state.global_step > self._saved_step:
                control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store what the Trainer has written."""
        self._report_validation()
        self._saved_step = state.global_step
        self._checkpoints.store(state.global_step)
        self._checkpoints.prune(args.save_total_limit, self._best_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what is left."""
        self._report_validation()
        self._is_training = False

    # --------------------------------------------------------------------------------------------- its own

    def _should_stop(self) -> bool:
        """Whether a stop was requested, which all ranks learn at the same step; a collective."""
        preempt, distributed = self.core_context.preempt, self.core_context.distributed
        if preempt._preempt_mode is core.PreemptMode.WorkersAskChief:
            return bool(preempt.should_preempt())
        # In the other modes a rank answers for itself alone: rank 0 does for all.
        return bool(distributed.broadcast(bool(self._is_chief and preempt.should_preempt())))

    def _be_patient(self) -> None:
        """Until the next step anything may take its time: a metric that is computed, a checkpoint, the script's end."""
        _PATIENCE.close()
        _PATIENCE.enter_context(HEART.patiently())

    def _report_validation(self) -> None:
        """Report the evaluations of one step, of one data set or several, each metric once."""
        metrics, self._validation = self._validation, {}
        if not metrics or (self._is_stopping and not self._is_training):
            return  # what a script evaluates after a stop belongs to the training that is resumed
        step = metrics["batches"]
        if step < self._validated_step:
            return
        if step > self._validated_step:
            self._validated, self._validated_step = set(), step
            names = ", ".join(sorted(metrics.keys() - {"batches", "epochs"}))
            fix = f"use one of {names}, or return it from compute_metrics"
            for key in ("metric", "time_metric"):
                name = self.searcher_metric if key == "metric" else self.time_metric
                if name is not None and name not in metrics:
                    key, message = f"searcher.{key}", "is not among the metrics of an evaluation"
                    raise ConfigError(
                        Problem(key=key, value=name, message=message, fix=fix, code="searcher-metric")
                    )
        metrics = {name: value for name, value in metrics.items() if name not in self._validated}
        self._validated |= set(metrics)
        if self._is_chief and metrics:
            self.core_context.train.report_validation_metrics(steps_completed=step, metrics=metrics)

    def _note_best(self, metrics: Mapping[str, Any], step: int | None) -> bool:
        value = finite(metrics.get(self.searcher_metric)) if self.searcher_metric else None
        if not is_better(value, self._best, smaller_is_better=self._smaller_is_better):
            return False
        self._best, self._best_step = value, step
        return True

    def _check_finite(self, name: str | None, value: Any, step: int) -> None:
        if isinstance(value, torch.Tensor):
            value = value.item()
        if self._fit.stop_on_nan and isinstance(value, float) and not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {value} at step {step}: nothing is saved of it; lower the learning rate, "
                "or set hyperparameters.fit.stop_on_nan: false"
            )


def _evaluates(args: Any) -> bool:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"


def _not_done(trial: Here, own: Hyperparameters, args: Any) -> Iterator[Problem]:
    """What the experiment requests and the Trainer would not do."""
    run, metric = trial.run, trial.searcher.get("metric")
    if run is not None and run.measurement is not None:
        message, fix = "the steps of transformers' Trainer are not measured", "measure a trial, or a session"
        yield Problem(key="--measure", value=run.measurement.steps, message=message, fix=fix, code="measure")
    if run is not None and run.fork is not None:
        message = "a run of transformers does not start from another's checkpoint by itself"
        key, fix = (
            "searcher.source_checkpoint_uuid",
            "give that checkpoint's folder checkpoint-N to from_pretrained",
        )
        yield Problem(
            key=key, value=str(run.fork), message=message, fix=f"remove it, and {fix}", code="hf-fork"
        )
    if args.world_size != num_ranks():
        # Without a GPU, accelerate takes each rank for the only one unless CPUs are requested.
        message = f"transformers sees {args.world_size} of {num_ranks()} ranks: each would train on all data"
        fix = "on CPUs, write TrainingArguments(use_cpu=True)"
        yield Problem(key="ranks", value=args.world_size, message=message, fix=fix, code="ranks")
    if metric and not (metric.startswith(EVALUATED) and _evaluates(args)):
        message = "transformers reports metrics of evaluations as eval_NAME, and nothing else"
        fix = "write eval_NAME, and eval_strategy or hyperparameters.fit.validation_period: {batches: N}"
        yield Problem(key="searcher.metric", value=metric, message=message, fix=fix, code="searcher-metric")
    if getattr(args, "resolved", None) is None:  # transformers' own arguments, which read no hyperparameter
        ds, length = getattr(getattr(args, "hf_deepspeed_config", None), "config", {}), own.fit.max_length
        # Ranks that share layers make one replica.
        sharing = (ds.get("tensor_parallel") or {}).get("autotp_size") or own.model_parallel_size
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        made = args.max_steps if length and length.unit == "batches" else args.num_train_epochs
        for path, wanted, found in (
            (("global_batch_size",), own.global_batch_size, batch * (args.world_size // int(sharing))),
            (("fit", "max_length"), length and length.value, made),
        ):
            if wanted not in (None, found):
                message = f"is not read by transformers' own arguments, which have {found}"
                fix = "use determined_ds.transformers.TrainingArguments"
                yield trial.hyperparameters.problem(path, message, fix, "stated-twice")


class ResumingTrainer:
    """What makes a class of trainers resume by itself and take part in ``--test``; put it before that class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        run = script_run()
        self._is_test = run is not None and run.test
        data: Any = getattr(self, "eval_dataset", None)
        if self._is_test and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            options: Any = self.args  # type: ignore[attr-defined]
            one_batch = range(min(len(data), options.per_device_eval_batch_size * options.world_size))
            selects = hasattr(data, "select")
            self.eval_dataset = (
                data.select(one_batch) if selects else torch.utils.data.Subset(data, one_batch)
            )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from ``args.resume_from_checkpoint`` where nothing else is said; under ``--test``, prove it.

        The proof loads the stored checkpoint over scrambled weights, and evaluates to the same number.
        """
        trainer: Any = self
        if resume_from_checkpoint is None:
            resume_from_checkpoint = trainer.args.resume_from_checkpoint
        output = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        run = script_run()
        if run is None or not self._is_test:
            return output
        callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, DetCallback)]
        if not callbacks or not trainer.is_deepspeed_enabled:
            message = "needs a DetCallback and a DeepSpeed JSON, to store a checkpoint and load it back"
            fix = "write Trainer(..., callbacks=[DetCallback(core_context, args)])"
            raise ConfigError(Problem(key="--test", message=message, fix=fix, code="test"))
        engine = trainer.model_wrapped

        def load() -> None:
            with callbacks[0]._checkpoints.newest() as folder:
                deepspeed_load_checkpoint(engine, str(folder))

        context = SimpleNamespace(models=[engine], device=trainer.args.device)
        same = prove_checkpoint(context, lambda: trainer.evaluate().get("eval_loss"), load)
        run.trained = True
        if is_chief():
            print(f"test passed: trained, validated, saved, loaded back, validated to {same}", flush=True)
        return output


class Trainer(ResumingTrainer, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, resuming from ``args.resume_from_checkpoint``; ``det-ds run --test`` needs it."""


class Seq2SeqTrainer(ResumingTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer``, in the same way."""
