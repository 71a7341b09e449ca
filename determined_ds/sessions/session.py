"""``determined_ds.session``: a plain DeepSpeed script with exact resume, preemption, metrics and search."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.sessions.data import TrainingBatches, ValidationData
from determined_ds.sessions.drive import Drive, ReportedValidation, ScriptTrial
from determined_ds.train.adoption import MADE
from determined_ds.train.data.loaders import has_state
from determined_ds.train.here import Here, here
from determined_ds.train.loop.display import Progress, make_progress
from determined_ds.train.loop.fit import completed, of_hyperparameters
from determined_ds.train.loop.trainer import Training
from determined_ds.train.opening import open_context
from determined_ds.trial.author import described

logger = logging.getLogger("determined_ds")
# What a trial writes -> what a script does.
WORDS = {
    MADE: "the engine of s.checkpoint",
    "ScriptTrial.": "",
    "build_training_data_loader": "s.loader",
    "self.training_loader": "s.loader",
    "self.validation_loader": "s.validation_loader",
    "context.get_train_micro_batch_size_per_gpu()": "s.resolved.batch.micro_batch_size",
    "context.overwrite(...)": "config=s.ds_config",
    "context.resolved": "s.resolved",
    "state what is missing": "state hyperparameters.global_batch_size",
    "context.wrap_model_engine(engine)": "s.checkpoint(engine)",
}
Config = str | os.PathLike[str] | Mapping[str, Any] | None


def session(
    config: Config = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    accelerator: str | None = None,
) -> Session:
    """Run a plain DeepSpeed script as an experiment: ``with determined_ds.session("experiment.yaml") as s:``.

    The same script runs by itself, under torchrun, by ``det-ds run`` and on a cluster. Under the last two everything
    is taken from the run, and the arguments are ignored.

    Args:
        config: The path of an experiment's YAML; a mapping of an experiment's configuration, or of hyperparameters;
            or None, where the script states all of its DeepSpeed configuration itself.
        run_dir: For metrics, checkpoints and TensorBoard files; ``runs/<name>/<time>`` if None.
        resume: Resume what is in ``run_dir``. The environment variable ``DETERMINED_DS_RESUME=DIR`` says both.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.

    Returns:
        The session, to be entered by ``with``.

    Raises:
        ConfigError: on entering: the configuration cannot run; every reason.
    """
    return Session(config, run_dir=run_dir, resume=resume, accelerator=accelerator)


class Session:
    """What :func:`session` gives a script. A step ends when the next batch is taken.

    What the script does after ``engine.step()`` belongs to the step: reports, a validation, a checkpoint. After a stop
    request the pass at hand ends early, and a script that begins another pass ends there, with exit code 0.
    """

    def __init__(
        self, config: Config, *, run_dir: str | os.PathLike[str] | None, resume: bool, accelerator: str | None
    ) -> None:
        self._config = config
        self._wanted_dir = None if run_dir is None else Path(run_dir)
        self._resume = resume
        self._accelerator = accelerator
        self._stack = contextlib.ExitStack()
        self._here: Here
        self._context: Any = None
        self._trial: Any = None
        self._loader: TrainingBatches | None = None
        self._drive: Drive | None = None
        self._validated = 0  # samples of the validation data since the last report

    # ------------------------------------------------------------------------------------ start and end

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            stack.push(lambda _kind, error, _traceback: say_in_words(error, WORDS))
            ranks, found = None, here()
            if found is None:
                # What makes a run is not sent to a cluster.
                from determined_ds.sessions.own_run import own_run

                run = own_run(
                    self._config,
                    self._wanted_dir,
                    resume=self._resume,
                    accelerator=self._accelerator,
                    stopped=lambda: self.stop_requested,
                )
                ranks, found = stack.enter_context(run), here()
            assert found is not None
            self._here = found
            if found.run is not None:
                found.run.trained = True
            self._context = stack.enter_context(
                open_context(distributed=ranks, accelerator=self._accelerator)
            )
            self._trial = ScriptTrial(self._context)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool | None:
        say_in_words(error, WORDS)  # before the run records it
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            return self._stack.__exit__(kind, error, traceback)
        with self._stack:
            if self._drive is not None and self._drive.was_driven:
                self._drive.close()
            elif self._loader is not None:
                raise TrainingError(
                    "nothing was trained: the loader of s.loader was not iterated\n"
                    "  fix: write for batch in loader: ..., with the loader that s.loader has returned"
                )
        return None

    # ------------------------------------------------------------------------------------ what was decided

    @property
    def context(self) -> Any:
        """Determined's DeepSpeed context, for what a session has no method for.

        Raises:
            ConfigError: the session was not entered.
        """
        if self._context is None:
            raise _refused("session", "is not entered", "write: with determined_ds.session(...) as s:")
        return self._context

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.context.device  # type: ignore[no-any-return]

    @property
    def distributed(self) -> Any:
        """The ranks: ``rank``, ``size``, ``local_rank``, ``allgather(...)`` and the like."""
        return self.context.distributed

    @property
    def rank(self) -> int:
        """Of this process, from 0."""
        return int(self.distributed.rank)

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None on a cluster."""
        run = self.context and self._here.run
        return run.run_dir if run is not None else None

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyperparameters of this point, derived ones included."""
        return dict(self.context.get_hparams())

    @property
    def resolved(self) -> ResolvedConfig:
        """What was decided.

        Raises:
            ConfigError: the batch is not known before ``s.checkpoint(engine)``.
        """
        return self.context.resolved  # type: ignore[no-any-return]

    @property
    def ds_config(self) -> dict[str, Any]:
        """The mapping for ``deepspeed.initialize(config=...)``, every ``"auto"`` filled.

        Raises:
            ConfigError: as for :attr:`resolved`.
        """
        return self.resolved.ds_config

    @property
    def batches_trained(self) -> int:
        """Optimizer steps that have ended since the start of training, in this process or before."""
        return 0 if self._drive is None else self._drive.training.state.batches_trained

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested and its checkpoint is written: end the script soon."""
        return self._drive is not None and self._drive.training.is_stopped

    # ------------------------------------------------------------------------------------ data

    def loader(self, dataset: Any, **options: Any) -> TrainingBatches:
        """The training data in micro-batches, shuffled; iterating it drives the training.

        Args:
            dataset: With an index, or a stream, as for ``DataParallelTrial.training_loader``; or torch's
                ``DataLoader`` over data with an index, which is split over the replicas here.
            options: Of Determined's ``DataLoader``, or of ``StreamLoader``; not ``batch_size``.

        Returns:
            What to iterate, once a pass. The batches are on the CPU.

        Raises:
            TrialError: it is not data, or a batch size is given.
            ConfigError: it is the second one.
        """
        if self._loader is not None:
            fix = "put the data into one dataset, such as torch.utils.data.ConcatDataset"
            raise _refused("s.loader", "was called before: a session has one training loader", fix)
        self._loader = TrainingBatches(self, self._maker("training_loader", dataset, options), dataset)
        self._trial.loader = self._loader
        return self._loader

    def validation_loader(self, dataset: Any, **options: Any) -> ValidationData:
        """This replica's share of the validation data, in order; every sample is in one share.

        What the script reports next with ``validation=True`` is weighted by the samples that this rank has taken. With
        a pipeline it yields iterators for ``engine.eval_batch``, each over one micro-batch.

        Args:
            dataset: As for :meth:`loader`. A stream is read whole by every replica.
            options: As for :meth:`loader`.

        Returns:
            What to iterate, once a validation. The batches are on the CPU.

        Raises:
            TrialError: it is not data, or a batch size is given.
        """
        return ValidationData(self, self._maker("validation_loader", dataset, options), dataset)

    def _maker(self, method: str, dataset: Any, options: Mapping[str, Any]) -> Any:
        """A function that makes a loader, once the batch is known."""
        trial = self.context and self._trial
        if not isinstance(dataset, (torch_data.DataLoader, pytorch.DataLoader)):
            return lambda: getattr(trial, method)(dataset, **options)
        if options:
            fix = f"give the dataset: self.{method}(loader.dataset, ...)"
            raise _refused(f"self.{method}", "got a loader, and options for another", fix)
        return lambda: dataset

    def epochs(self, num: int) -> Iterator[int]:
        """The numbers of the epochs that are left: those done before a resume are skipped.

        It ends after a stop request, and at ``fit.max_length`` where that is stated.

        Args:
            num: Epochs in all, >= 1: passes over the data.

        Yields:
            0 .. num - 1.

        Raises:
            ConfigError: there is no engine or no data yet.
        """
        return self._drive_of("s.epochs").epochs(num)

    def steps(self, num: int | None = None) -> Iterator[Any]:
        """For each optimizer step that is left, an iterator over its micro-batches, e.g. for a pipeline::

            for batches in s.steps():
                loss = engine.train_batch(data_iter=batches)

        Args:
            num: Steps in all, >= 1; None: to ``fit.max_length``.

        Yields:
            Iterators; None on ranks that load nothing, such as a pipeline's middle stages.

        Raises:
            ConfigError: there is no engine, no data or no length yet.
        """
        drive = self._drive_of("s.steps")
        if num is None and drive.training.fit.max_length is None:
            fix = "write s.steps(1000), or state fit.max_length"
            raise _refused("s.steps", "nothing says how long to train", fix)
        return drive.steps(num)

    # ------------------------------------------------------------------------------------ checkpoints, metrics

    def checkpoint(self, *engines: Any, **state: Any) -> None:
        """Hand over the engines, before the first batch; called again, have a checkpoint written.

        The first call resumes them, where the run resumes. A later one writes a checkpoint when the step ends, beside
        those of ``fit.checkpoint_period``; call it on all ranks.

        Args:
            engines: What ``deepspeed.initialize`` has returned first, of each engine.
            state: Name -> object with ``state_dict`` and ``load_state_dict`` that is saved and restored with them:
                an average of the weights, a scheduler of your own, counters.

        Raises:
            ConfigError: it is not an engine, or one with other batch sizes than were decided.
            CheckpointError: the checkpoint to resume from does not fit.
            TrainingError: when the step ends: a later call was made on some ranks only.
        """
        if self._drive is None:
            self._begin(engines, state)
            return
        known = [id(engine) for engine in self.context.models]
        if any(id(engine) not in known for engine in engines):
            fix = "give all engines to the first call: s.checkpoint(generator, discriminator)"
            raise _refused("s.checkpoint", "got an engine that its first call was not given", fix)
        caller = sys._getframe(1)
        self._drive.request_checkpoint(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")

    def _begin(self, engines: tuple[Any, ...], state: Mapping[str, Any]) -> None:
        context, key = self.context, "s.checkpoint"
        fix = "engine, *_ = deepspeed.initialize(...); s.checkpoint(engine)"
        if not engines:
            raise _refused(key, "its first call was given no engine", fix)
        for engine in engines:
            if not isinstance(engine, deepspeed.DeepSpeedEngine):
                raise _refused(key, f"got {described(engine)}; expected an engine of DeepSpeed", fix)
        for name, each in state.items():
            if not has_state(each):
                message = f"{name} is {described(each)}, which has no state_dict and load_state_dict"
                raise _refused(key, message, "give it both, or leave it out")
        for engine in engines:
            context.wrap_model_engine(engine)
        training, run = self._training(), self._here.run
        self._stack.enter_context(training)
        fork = run.fork if run is not None else None
        self._drive = Drive(training, state, run, self._here.latest_checkpoint, fork)

    def _training(self) -> Training:
        """What the script drives: as the hyperparameters say, or the steps that are measured."""
        context, run, measure = self.context, self._here.run, None
        tests = run is not None and run.test
        if run is not None and run.measurement is not None:
            from determined_ds.train.loop.measure import Measuring, check_strategy, measured_fit

            check_strategy(context, made_by="the script", fix="initialize the engine with config=s.ds_config")
            measure = Measuring(self._trial, context, run.measurement)
            fit, progress = measured_fit(run.measurement), Progress(shows=False)
        else:
            fit = of_hyperparameters(context.resolved.fit)
            for name in ("validation_period", "step_zero_validation"):
                if getattr(fit, name) and self.rank == 0:
                    logger.warning("warning: fit.%s: no effect in a session, whose script validates", name)
            fit = replace(fit, step_zero_validation=False)
            fit = completed(fit, context, test_mode=tests, states_length=False)
            progress = make_progress(self.rank == 0, context._run_dir.metrics)
        return Training(
            self._trial,
            context,
            fit,
            progress,
            test_mode=tests,
            measure=measure,
            validator=ReportedValidation(context),
            source="s.report",
        )

    def report(self, metrics: Mapping[str, Any], *, validation: bool = False) -> None:
        """Report metrics of a micro-batch, or of a validation.

        Training metrics become means over ranks and over each ``fit.reporting_period``. Validation metrics become means
        over the ranks that report any; each counts the samples that it has taken from a validation loader since its
        last report, or else 1. Both go to where the run's metrics go when the step ends.

        Args:
            metrics: Name -> number, or tensor of one number. A ``loss`` that is not finite stops the training.
            validation: Whether they are of a validation, and ``searcher.metric`` may be among them.

        Raises:
            TrainingError: a value is not a number.
        """
        if not isinstance(metrics, Mapping):
            raise TrainingError(
                f"s.report: got {described(metrics)}; expected metrics by name\n"
                '  fix: write s.report({"loss": loss})'
            )
        weight, self._validated = float(self._validated or 1), 0 if validation else self._validated
        self._drive_of("s.report").report(metrics, validation=validation, weight=weight)

    def _drive_of(self, what: str) -> Drive:
        """What is driven; refused where something has to come before what the script does."""
        drive, is_pipeline = self._drive, self.context.use_pipeline_parallel
        if drive is None:
            fix = "call s.checkpoint(engine) after deepspeed.initialize"
            raise _refused(what, "no engine was handed over yet", fix)
        if what in ("s.steps", "s.epochs") and self._loader is None:
            raise _refused(what, "there is no training data", "call loader = s.loader(dataset) before")
        if what == "iterating the loader" and is_pipeline:
            fix = "write: for batches in s.steps(): engine.train_batch(data_iter=batches)"
            raise _refused(what, "a pipeline takes its batches itself", fix)
        return drive


def _refused(key: str, message: str, fix: str) -> ConfigError:
    """The error of a call; ``key`` names it as the script writes it."""
    return ConfigError(Problem(key=key, message=message, fix=fix, code="session"))


def say_in_words(error: BaseException | None, words: Mapping[str, str]) -> None:
    """Put an error of the configuration into other words, where it is one: those of its reader."""

    def said(text: str) -> str:
        for before, after in words.items():
            text = text.replace(before, after)
        return text

    if isinstance(error, ConfigError):
        error.problems = tuple(
            replace(each, key=said(each.key), message=said(each.message), fix=said(each.fix))
            for each in error.problems
        )
