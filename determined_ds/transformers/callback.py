"""``DetCallback`` and ``Trainer``: transformers' Trainer on Determined, in place of ``determined.transformers``.

The Trainer takes the steps, evaluates, and writes ``checkpoint-N`` into its folder. The callback reports what it logs,
stores its checkpoints whole in Determined's storage, and requests its stops.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import determined as det
import torch
import transformers
from determined import core
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from determined_ds.checkpoints.files import finite, over_limit
from determined_ds.cluster.core_context import cluster_core_context
from determined_ds.config.params import FitOptions, parse_hyperparameters
from determined_ds.documents.files import write_whole
from determined_ds.errors import NotFiniteError, TrainingError
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.process_group import as_chief, join_process_group
from determined_ds.train.group.watch import leave_watch
from determined_ds.train.loop.trainer import prove_checkpoint
from determined_ds.train.memory import memory_metrics, peak_bytes
from determined_ds.train.rank import Here, report_to_tools, run_here
from determined_ds.transformers.arguments import accelerator_here, num_ranks, placed, trial_here, warn
from determined_ds.trial.returned import refused

# Metrics that are left out, as Determined's callback does: rounded, or of the speed of one evaluation.
SPEEDS = ("_runtime", "_per_second", "_compilation_time")
USER_DATA = "my_data.json"  # as Determined's callback names it
KEPT = "determined_ds.json"  # in a checkpoint: the trial's checkpoints before it


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
        self.core_context, self._distributed = core_context, core_context.distributed
        self._is_chief, self._user_data = core_context.distributed.rank == 0, user_data
        trial, info, searcher = trial_here(), det.get_cluster_info(), dict[str, Any]()
        self._fit = FitOptions(checkpoint_policy="none")
        if trial is not None:
            _check_carried_out(trial, args)
            searcher = trial.searcher
            if trial.hyperparameters.get(("fit",)) is not None:
                self._fit = parse_hyperparameters(trial.hyperparameters).fit
        self._metadata = {} if trial is None or info is None else {"trial_id": info.trial.trial_id}
        self._metric: str | None = searcher.get("metric")
        self._sign = -1 if searcher.get("smaller_is_better") is False else 1
        self._needed = {key: searcher[key] for key in ("metric", "time_metric") if key in searcher}
        self._filter = None if filter_metrics is None else [*filter_metrics, *self._needed.values()]
        args.output_dir = placed(args.output_dir)
        self._folder = Path(args.output_dir)
        self._kept: list[dict[str, Any]] = []  # checkpoints, the oldest first: uuid and steps_completed
        self._is_training = self._is_stopping = False
        self._validation: dict[str, Any] = {}  # of the step at hand, until all data sets are evaluated
        self._running: tuple[int, float] | None = None  # since the last pause: its step, and when it ended
        self._resumed_step: int | None = None
        if trial is not None and trial.latest_checkpoint is not None:
            self._resumed_step = self._fetch(Path(trial.latest_checkpoint).name)
            args.resume_from_checkpoint = str(self._folder / f"checkpoint-{self._resumed_step}")
        done = -1 if self._resumed_step is None else self._resumed_step
        self._validated_step = self._trained_step = self._saved_step = done

    def _fetch(self, uuid: str) -> int:
        """Bring a checkpoint into the Trainer's folder; a collective. Returns its step."""
        storage = self.core_context.checkpoint

        def make_room() -> int:
            steps = int(storage.get_metadata(uuid).get("steps_completed", -1))
            for there in self._folder.glob("checkpoint-[0-9]*"):
                if int(there.name.split("-")[1]) >= steps:  # by a run that ended before it was stored
                    shutil.rmtree(there)
            return steps

        steps = as_chief(self._distributed, make_room)
        storage.download(uuid, str(self._folder))
        self._distributed.allgather(None)  # machines may share the folder
        with contextlib.suppress(OSError, ValueError, KeyError):  # of Determined's callback there is none
            self._kept = json.loads((self._folder / f"checkpoint-{steps}" / KEPT).read_bytes())["checkpoints"]
        self._kept.append({"uuid": uuid, "steps_completed": steps})
        return steps

    # ------------------------------------------------------------------------------- of transformers' Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._resumed_step not in (None, state.global_step):
            raise TrainingError(
                f"training begins at step {state.global_step}, and the checkpoint is of step {self._resumed_step}\n"
                "  fix: write trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)"
            )
        self._is_training, self._is_stopping = True, False
        given, run = getattr(args, "hf_deepspeed_config", None), run_here()
        if given is not None and run is not None and self._is_chief:  # for the closing block
            write_whole(run.there.deepspeed_config, json.dumps(given.config, indent=2, default=str) + "\n")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the evaluation before the step, which shows signs of life from now on."""
        HEART.patient = 0
        HEART.beat()
        self._report_validation()
        self._running = self._running or (state.global_step, time.perf_counter())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        HEART.beat()

    on_prediction_step = on_substep_end  # signs of life, both

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Progress, and whether to stop; asked at every step, a collective."""
        step, last = state.global_step, max(1, state.max_steps)
        HEART.step(step)
        if self._is_chief and 100 * step // last > 100 * (step - 1) // last:
            self.core_context.train.report_progress(min(1.0, step / last))
        # A finished trial that acknowledged a stop would be started again by the master.
        if step < state.max_steps:
            preempt = self.core_context.preempt
            if preempt._preempt_mode is core.PreemptMode.WorkersAskChief:
                stops = preempt.should_preempt()
            else:  # a rank answers for itself alone: rank 0 does for all
                stops = self._distributed.broadcast(bool(self._is_chief and preempt.should_preempt()))
            if stops:
                self._is_stopping = control.should_training_stop = True
        # Of what is saved, the loss is known before: it must be finite, and a resumed run counts from here.
        control.should_log = control.should_log or control.should_save or control.should_training_stop
        if control.should_evaluate or control.should_save:
            HEART.patient = 1  # until the next step: a metric or a checkpoint may take any time

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """At the end, evaluate and save what was not; in the middle of a pass, only save."""
        HEART.patient = 1  # so may the end of the script
        self._report_validation()
        step = state.global_step
        if self._is_stopping and state.epoch != int(state.epoch):  # this pass is trained to its end later
            control.should_evaluate = control.should_save = False
        is_end = control.should_training_stop or step >= state.max_steps
        if is_end and not self._is_stopping and step > self._validated_step and args.eval_strategy != "no":
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
            metrics |= memory_metrics(self._distributed.allgather(peak_bytes(args.device)))
            if self._running is not None and step > self._running[0]:
                samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
                seconds = time.perf_counter() - self._running[1]
                metrics["samples_per_second"] = samples * (step - self._running[0]) / seconds
            if self._is_chief:
                self.core_context.train.report_training_metrics(step, metrics)
        self._running = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Decide whether the evaluated weights are saved; a collective."""
        if not self._is_training or metrics is None:
            return
        if "eval_runtime" in metrics:  # there is one data set: before the Trainer itself misses a metric
            self._report_validation()
        if self._metric in metrics:
            self._check_finite(self._metric, metrics[self._metric], state.global_step)
            policy = self._fit.checkpoint_policy
            is_best = policy == "best" and self._best_step(state) == state.global_step
            wanted = self._distributed.broadcast(is_best or policy == "all")
            if wanted and state.global_step > self._saved_step:
                control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store ``checkpoint-N``, and delete the oldest ones over the limit, never the best nor the newest."""
        self._report_validation()
        self._saved_step = step = state.global_step
        name, storage = f"checkpoint-{step}", self.core_context.checkpoint
        if self._is_chief:
            (self._folder / name / KEPT).write_text(json.dumps({"checkpoints": self._kept}))
            if self._user_data is not None:
                (self._folder / name / USER_DATA).write_text(json.dumps(self._user_data))
        self._distributed.allgather(None)
        about = {"steps_completed": step, **self._metadata}
        uuid = storage.upload(
            str(self._folder), metadata=about, shard=True, selector=lambda path: path.startswith(f"{name}/")
        )
        self._kept.append({"uuid": uuid, "steps_completed": step})
        best = next((each for each in self._kept if each["steps_completed"] == self._best_step(state)), None)
        for each in over_limit(self._kept, args.save_total_limit, best):
            self._kept.remove(each)
            if self._is_chief:
                storage.delete(each["uuid"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report_validation()
        self._is_training = False

    # --------------------------------------------------------------------------------------------- its own

    def _report_validation(self) -> None:
        """Report the evaluations of one step, of one data set or several, once."""
        metrics, self._validation = self._validation, {}
        # What a script evaluates after a stop belongs to the training that is resumed.
        is_late = self._is_stopping and not self._is_training
        if not metrics or is_late or metrics["batches"] <= self._validated_step:
            return
        self._validated_step = metrics["batches"]
        for key, name in self._needed.items():
            if name not in metrics:
                names = ", ".join(sorted(metrics.keys() - {"batches", "epochs"}))
                fix = f"use one of {names}, or return it from compute_metrics"
                message = "is not among the metrics of an evaluation"
                raise refused(f"searcher.{key}", message, fix, "searcher-metric", value=name)
        if self._is_chief:
            self.core_context.train.report_validation_metrics(self._validated_step, metrics)

    def _best_step(self, state: Any) -> int | None:
        """The step of the best evaluation of all, those before a resume included; of equals the first."""
        values = [(finite(logs.get(self._metric)), logs["step"]) for logs in state.log_history]
        found = [(self._sign * value, step) for value, step in values if value is not None]
        return min(found)[1] if found else None

    def _check_finite(self, name: str | None, value: Any, step: int) -> None:
        if self._fit.stop_on_nan and value is not None and not math.isfinite(value):
            raise NotFiniteError(
                f"{name} is {float(value)} at step {step}: nothing is saved of it; lower the learning rate, "
                "or set hyperparameters.fit.stop_on_nan: false"
            )


def _check_carried_out(trial: Here, args: Any) -> None:
    """Refuse what the experiment requests and the Trainer would not do."""
    run, metric, world = trial.run, trial.searcher.get("metric"), num_ranks()
    if run is not None and run.measurement is not None:
        fix = "measure a trial, or a session"
        raise refused("--measure", "the steps of transformers' Trainer are not measured", fix, "measure")
    if run is not None and run.fork is not None:
        message = "transformers' Trainer does not start from another run's checkpoint by itself"
        fix = "remove it, and give that checkpoint's folder checkpoint-N to from_pretrained"
        raise refused("searcher.source_checkpoint_uuid", message, fix, "hf-fork")
    if args.world_size != world:  # without a GPU, accelerate takes each rank for the only one
        message = f"transformers sees {args.world_size} of {world} ranks: each would train on all data"
        raise refused("ranks", message, "on CPUs, write TrainingArguments(use_cpu=True)", "ranks")
    if metric and (args.eval_strategy == "no" or not metric.startswith("eval_")):
        message = "transformers reports metrics of evaluations as eval_NAME, and nothing else"
        fix = "write eval_NAME, and eval_strategy or hyperparameters.fit.validation_period: {batches: N}"
        raise refused("searcher.metric", message, fix, "searcher-metric", value=metric)
    own = [name for name in ("global_batch_size", "fit") if trial.hyperparameters.get((name,)) is not None]
    if own and getattr(args, "resolved", None) is None:
        fix = "import them from determined_ds.transformers"
        warn("hyperparameters.%s: not read by transformers' own TrainingArguments. fix: %s", own[0], fix)


class ResumingTrainer:
    """What makes a class of trainers resume by itself and take part in ``--test``; put it before that class."""

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from ``args.resume_from_checkpoint`` where nothing else is said; under ``--test``, prove it.

        The proof loads the stored checkpoint over scrambled weights, and evaluates one batch to the same number.
        """
        trainer: Any = self
        options, data, run = trainer.args, trainer.eval_dataset, run_here()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = options.resume_from_checkpoint
        if run is None or not run.test:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, dict):
            one_batch = range(min(len(data), options.per_device_eval_batch_size * options.world_size))
            trainer.eval_dataset = torch.utils.data.Subset(data, one_batch)
        output = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, DetCallback)]
        if not callbacks or not trainer.is_deepspeed_enabled:
            message = "needs a DetCallback and a DeepSpeed JSON, to store a checkpoint and load it back"
            fix = "write Trainer(..., callbacks=[DetCallback(core_context, args)])"
            raise refused("--test", message, fix, "test")

        def load() -> None:
            newest = callbacks[0]._kept[-1]
            with callbacks[0].core_context.checkpoint.restore_path(newest["uuid"]) as path:
                stored = Path(path) / f"checkpoint-{newest['steps_completed']}"
                deepspeed_load_checkpoint(trainer.model_wrapped, str(stored))

        context = SimpleNamespace(models=[trainer.model_wrapped], device=options.device)
        same = prove_checkpoint(context, lambda: trainer.evaluate().get("eval_loss"), load)
        run.trained = True
        if trainer.is_world_process_zero():
            print(f"test passed: trained, validated, saved, loaded back, validated to {same}", flush=True)
        return output


class Trainer(ResumingTrainer, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, resuming from ``args.resume_from_checkpoint``; ``det-ds run --test`` needs it."""


class Seq2SeqTrainer(ResumingTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer``, in the same way."""
