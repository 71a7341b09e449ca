"""``determined_ds.session``: a plain DeepSpeed script with exact resume, preemption, metrics and search.

The way of a step: a loader gives the micro-batches of the training's data (``stand_ins``); the script trains on them,
and reports; when it asks for the next one, the step before has ended, and :class:`Trainer` does what is due after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.params import Length
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, TrainingError
from determined_ds.sessions.stand_ins import (
    ReportedValidation,
    ScriptState,
    ScriptTrial,
    TrainingBatches,
    ValidationData,
    engine_marks,
    sums_of_weights,
)
from determined_ds.train.context import MADE
from determined_ds.train.data.loaders import has_state
from determined_ds.train.group.process_group import all_ranks_come
from determined_ds.train.here import here
from determined_ds.train.loop.stopping import Due
from determined_ds.train.loop.trainer import Trainer, of_hyperparameters
from determined_ds.train.opening import open_context
from determined_ds.trial.returned import described, refused

logger = logging.getLogger("determined_ds")
# What a trial writes, or det-ds run takes -> what a script does.
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
    "add --resume to continue it": "write session(..., resume=True) to continue it",
    "add --run-dir ": "write run_dir=",
    "--run-dir": "run_dir",
    "--resume": "resume",
}
# How long a rank that reports a validation, or wants a checkpoint, waits for the others, which have computed the same.
COME_WITHIN_S = 120.0
# Passes that a script may begin after the end of training: for epoch in range(n). One that begins more never ends.
MOST_EMPTY = 1000


@contextlib.contextmanager
def session(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    accelerator: str | None = None,
) -> Iterator[Session]:
    """Run a plain DeepSpeed script as an experiment: ``with determined_ds.session("experiment.yaml") as s:``.

    The same script runs by itself, under torchrun, by ``det-ds run`` and on a cluster. Under the last two everything
    is taken from the run, and the arguments are ignored.

    Args:
        config: The path of an experiment's YAML; a mapping of an experiment's configuration, or of hyperparameters;
            or None, where the script states all of its DeepSpeed configuration itself.
        run_dir: For metrics, checkpoints and TensorBoard files; ``runs/<name>/<time>`` if None.
        resume: Resume what is in ``run_dir``. The environment variable ``DETERMINED_DS_RESUME=DIR`` says both.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.

    Yields:
        The session.

    Raises:
        ConfigError: the configuration cannot run; every reason.
    """
    s: Session | None = None
    with contextlib.ExitStack() as stack:
        stack.push(_say_in_words_of_scripts)
        ranks, trial = None, here()
        if trial is None:
            # What makes a run is not sent to a cluster.
            from determined_ds.sessions.own_run import own_run

            own = own_run(
                config, run_dir, resume, accelerator, stopped=lambda: s is not None and s.stop_requested
            )
            ranks, trial = stack.enter_context(own), here()
            stack.push(_say_in_words_of_scripts)  # before the run records it
        assert trial is not None
        if trial.run is not None:
            trial.run.trained = True
        context = stack.enter_context(open_context(distributed=ranks, accelerator=accelerator))
        s = Session(context, trial, stack)
        try:
            yield s
        except SystemExit as error:
            if not error.code:
                s._close()
            raise
        s._close()


def _say_in_words_of_scripts(_kind: Any, error: BaseException | None, _traceback: Any) -> None:
    """Put an error of the configuration into the words of its reader."""

    def said(text: str) -> str:
        for before, after in WORDS.items():
            text = text.replace(before, after)
        return text

    if isinstance(error, ConfigError):
        error.problems = tuple(
            replace(each, key=said(each.key), message=said(each.message), fix=said(each.fix))
            for each in error.problems
        )


class Session:
    """What :func:`session` gives a script. A step ends when the next batch is taken.

    What the script does after ``engine.step()`` belongs to the step, and is in its checkpoint: reports, a validation, a
    checkpoint. So a run always resumes where a batch is taken. At the end of a pass the next batch is that of the next
    pass, and at the end of training there is none: there the step ends with the session. After a stop request the pass
    at hand ends early, and a script that begins another pass ends there, with exit code 0.

    Attributes:
        context: Determined's DeepSpeed context, for what a session has no method for.
        device: Where this rank computes.
        distributed: The ranks: ``rank``, ``size``, ``local_rank``, ``allgather(...)`` and the like.
        rank: Of this process, from 0.
        run_dir: The run directory; None on a cluster.
    """

    def __init__(self, context: Any, trial: Any, stack: contextlib.ExitStack) -> None:
        self.context, self._run, self._stack = context, trial.run, stack
        self._is_measured = trial.run is not None and trial.run.measurement is not None
        self.device: torch.device = context.device
        self.distributed = context.distributed
        self.rank = int(context.distributed.rank)
        self.run_dir: Path | None = None if trial.run is None else trial.run.run_dir
        self._trial = ScriptTrial(context)
        self._loader: TrainingBatches | None = None
        self._validated = 0  # samples of the validation data since the last report
        self._latest = trial.latest_checkpoint
        # From the first call of s.checkpoint on.
        self._training: Any = None  # a Trainer
        self._state: ScriptState
        self._loaded: str | None = None  # the checkpoint that is resumed from
        self._marks: Any = None
        # From the first batch on.
        self._is_open = False
        self._batches: Iterator[Any] | None = None
        self._length: Length | None = None  # of the training, as the script says
        # The step at hand: its micro-batches so far, and (steps, micro-steps) of each engine before it.
        self._taken = self._accumulation = 0
        self._before: list[tuple[int, int]] = []
        self._wants_checkpoint = False
        self._begun = self._empty = 0  # passes of this process; of these, begun after the end of training
        self._is_cut = self._has_warned = False  # the last one was left before its end; that was said

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
        """The mapping for ``deepspeed.initialize(config=...)``, every ``"auto"`` filled; see :attr:`resolved`."""
        return self.resolved.ds_config

    @property
    def batches_trained(self) -> int:
        """Optimizer steps that have ended since the start of training, in this process or before."""
        return 0 if self._training is None else self._training.state.batches_trained

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested and its checkpoint is written: end the script soon."""
        return self._training is not None and self._training.is_stopped

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
            ConfigError: it is not data, a batch size is given, or it is the second one.
        """
        if self._loader is not None:
            fix = "put the data into one dataset, such as torch.utils.data.ConcatDataset"
            raise refused("s.loader", "was called before: a session has one training loader", fix, "session")
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
        """
        return ValidationData(self, self._maker("validation_loader", dataset, options), dataset)

    def _maker(self, method: str, dataset: Any, options: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that makes a loader, once the batch is known."""
        if not isinstance(dataset, (torch_data.DataLoader, pytorch.DataLoader)):
            return lambda: getattr(self._trial, method)(dataset, **options)
        if options:
            fix = f"give the dataset: self.{method}(loader.dataset, ...)"
            raise refused(f"self.{method}", "got a loader, and options for another", fix, "session")
        return lambda: dataset

    # ------------------------------------------------------------------------------------ steps

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
        training = self._driven("s.epochs")
        self._length = Length(unit="epochs", value=num)
        self._begun = max(self._begun, self._state.passes)
        for epoch in range(self._state.passes, num):
            if self._is_open and not training.goes_on:
                return
            yield epoch
            if epoch + 1 < num:
                self._end_step(agreed=True)

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
        if self._driven("s.steps").fit_options.max_length is None and num is None:
            fix = "write s.steps(1000), or state fit.max_length"
            raise refused("s.steps", "nothing says how long to train", fix, "session")
        if num is not None:
            self._length = Length(unit="batches", value=num)
        for batches in self._steps(in_pass=False, num=num):
            if self._batches is None:
                self._begin_step()
                self._taken = self._accumulation
            yield None if self._batches is None else batches
            if self._taken < self._accumulation:
                raise TrainingError(
                    f"{self._taken} of {self._accumulation} micro-batches of a step were taken\n  fix: take all of "
                    "them: engine.train_batch(data_iter=batches) for each iterator of s.steps()"
                )

    def _one_pass(self) -> Iterator[Any]:
        """The micro-batches of a pass over the data; none where it was finished before the checkpoint."""
        self._driven(what := "iterating the loader")
        if self.context.use_pipeline_parallel:
            fix = "write: for batches in s.steps(): engine.train_batch(data_iter=batches)"
            raise refused(what, "a pipeline takes its batches itself", fix, "session")
        self._begun += 1
        if self._begun > self._state.passes:
            for batches in self._steps(in_pass=True):
                yield from batches

    def _steps(self, *, in_pass: bool, num: int | None = None) -> Iterator[Iterator[Any]]:
        """The micro-batches of each step that is left, of a pass or of ``num`` in all; first the one before ends."""
        training = self._training
        if training.is_stopped:  # the script was given the chance to end by itself
            raise SystemExit(0)
        if not self._is_open:
            self._open()
        self._end_step(agreed=in_pass)
        per_pass, stated = training.schedule.batches_per_epoch, training.schedule.stated_batches
        if not training.goes_on:
            self._empty += in_pass
            if self._empty > MOST_EMPTY:  # it iterates the loader for ever, though training is over
                raise SystemExit(0)
        elif in_pass and self._is_cut and training.is_chief and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "warning: a pass over the loader was left before its end, and the next one continues it; a "
                "resumed run counts whole passes. fix: state fit.max_length, or write for batches in s.steps(n)"
            )
        while training.goes_on and (num is None or self.batches_trained < num):
            self._is_cut, done = in_pass, self.batches_trained + 1
            yield self._micro_batches()
            if done in (num, stated) or (in_pass and per_pass is not None and done % per_pass == 0):
                self._is_cut = False
                self._pause()
                if self._is_measured and done == stated:
                    raise SystemExit(0)  # what the script would do next is not wanted
                return
            self._end_step(agreed=False)

    def _micro_batches(self) -> Iterator[Any]:
        while self._taken < self._accumulation:
            if not self._taken:
                self._begin_step()
            assert self._batches is not None, "every rank but a pipeline's loads"
            batch = next(self._batches)
            self._taken += 1
            yield batch

    def _begin_step(self) -> None:
        self._training.begin_step()
        self._before = self._counters()

    def _counters(self) -> list[tuple[int, int]]:
        return [(engine.global_steps, engine.micro_steps) for engine in self.context.models]

    def _pause(self) -> None:
        """What follows is not training."""
        if self._is_open:
            self._training.reporter.pause()
            for each in self._training.observers if self._before != self._counters() else ():
                each.stop()

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
        key, context, run = "s.checkpoint", self.context, self._run
        if self._training is not None:
            if not {id(engine) for engine in engines} <= {id(each) for each in context.models}:
                fix = "give all engines to the first call: s.checkpoint(generator, discriminator)"
                raise refused(key, "got an engine that its first call was not given", fix, "session")
            self._wants_checkpoint = self._wants_checkpoint or self._listens
            return
        fix = "engine, *_ = deepspeed.initialize(...); s.checkpoint(engine)"
        if not engines:
            raise refused(key, "its first call was given no engine", fix, "session")
        for engine in engines:
            if not isinstance(engine, deepspeed.DeepSpeedEngine):
                message = f"got {described(engine)}; expected an engine of DeepSpeed"
                raise refused(key, message, fix, "session")
        for name, each in state.items():
            if not has_state(each):
                message = f"{name} is {described(each)}, which has no state_dict and load_state_dict"
                raise refused(key, message, "give it both, or leave it out", "session")
        for engine in engines:
            context.wrap_model_engine(engine)
        if run is not None and run.measurement is not None:
            from determined_ds.train.loop.measure import Measuring, check_strategy

            check_strategy(context, made_by="the script", fix="initialize the engine with config=s.ds_config")
            training = Measuring(self._trial, context, run.measurement, source="s.report").training
        else:
            fit = of_hyperparameters(context.resolved.fit)
            for name in ("validation_period", "step_zero_validation"):
                if getattr(fit, name) and self.rank == 0:
                    logger.warning("warning: fit.%s: no effect in a session, whose script validates", name)
            fit = replace(fit, validation_period=None, step_zero_validation=False)
            tests, reported = run is not None and run.test, ReportedValidation(context)
            training = Trainer(self._trial, context).prepare(
                fit, test_mode=tests, validator=reported, source="s.report"
            )
        self._stack.enter_context(training.closing)
        self._accumulation = context.resolved.batch.accumulation
        self._state = training.checkpoints.parts["script"] = ScriptState(training, state)
        training.load(self._latest, run.fork if run is not None else None)
        self._loaded = self._latest if training.state.batches_trained else None
        self._marks, self._training = engine_marks(context.models), training

    def report(self, metrics: Mapping[str, Any], *, validation: bool = False) -> None:
        """Report metrics of a micro-batch, or of a validation.

        Training metrics become means over ranks and over each ``fit.reporting_period``. Validation metrics become means
        over the ranks that report any; each counts the samples that it has taken from a validation loader since its
        last report, or else 1. Both go to where the run's metrics go when the step ends. What is reported before the
        first step of a resumed run was reported then, and is ignored.

        Args:
            metrics: Name -> number, or tensor of one number. A ``loss`` that is not finite stops the training.
            validation: Whether they are of a validation, and ``searcher.metric`` may be among them.

        Raises:
            TrainingError: a value is not a number.
        """
        weight, self._validated = float(self._validated or 1), 0 if validation else self._validated
        training = self._driven("s.report")
        if self._listens and not validation:
            training.take(dict(metrics))
        elif self._listens:
            training.validator.add(metrics, weight)

    @property
    def _listens(self) -> bool:
        """Whether a report belongs to a step: not before the first one of a resumed run, nor after the last one."""
        if not self._is_open:
            return self._loaded is None
        return self._taken == self._accumulation or self._training.goes_on

    # ------------------------------------------------------------------------------------ begin, end, between steps

    def _driven(self, what: str) -> Any:
        """The trainer that takes the steps; refused before there is one."""
        if self._training is None:
            fix = "call s.checkpoint(engine) after deepspeed.initialize"
            raise refused(what, "no engine was handed over yet", fix, "session")
        return self._training

    def _open(self) -> None:
        """Begin training, at the first batch; a collective."""
        training = self._training
        if self._loaded is not None:  # what the script has done since then is undone: it was done before
            if self._marks != engine_marks(self.context.models):
                training.read(self._loaded)
            else:
                self._state.restore_objects()
        if training.fit_options.max_length is None:
            training.fit_options = replace(training.fit_options, max_length=self._length)
        self._batches = training.begin()
        if training.schedule.stated_batches is None and training.schedule.batches_per_epoch is None:
            message = "the training data has no length, so nothing says when a pass over it ends"
            fix = "state fit.max_length: {batches: 1000}, or give the dataset a __len__"
            raise refused("s.loader", message, fix, "epochs-without-length")
        if any(self.distributed.allgather(training.validator.is_pending)):  # reported before the first batch
            training.do(Due(validate=True))
        self._is_open = True

    def _end_step(self, *, agreed: bool, ends: bool = False) -> None:
        """End the step at hand, if all of it was taken; ``agreed``: all ranks come here, whatever is due."""
        if self._taken < self._accumulation:
            return
        self._taken, engines, did = 0, self.context.models, ""
        if self._training._steps_before == [engine.global_steps for engine in engines]:
            did = "no engine has made a step with the last batch"
        for engine in () if self.context.use_pipeline_parallel else engines:
            if engine.micro_steps % (accumulation := engine.gradient_accumulation_steps()):
                did = f"an engine was stepped {engine.micro_steps} times, within an accumulation of {accumulation}"
        if did:
            fix = "call engine.backward(loss) and engine.step() once for each micro-batch of the loader"
            raise TrainingError(f"the loader is asked for the next batch, and {did}\n  fix: {fix}")
        self._training.end_step(lambda due: self._due(due, agreed=agreed, ends=ends))

    def _due(self, due: Due, *, agreed: bool, ends: bool) -> Due:
        """What is due at the end of a step, with what any rank wants; a collective where all ranks come here.

        In the middle of a pass, where asking at each step would cost time, every rank has to want the same: one alone
        would wait for the others.
        """
        ends, validates, wants = due.end or ends, self._training.validator.is_pending, self._wants_checkpoint
        self._wants_checkpoint = False
        if agreed or ends:
            ranks = self.distributed.allgather((validates, wants))
            validates, wants = (any(each) for each in zip(*ranks, strict=True))
        elif validates or wants:
            name = f"script/{self.batches_trained}/{validates}/{wants}"
            if not all_ranks_come(name, within_s=COME_WITHIN_S):
                called = "s.checkpoint()" if wants else "s.report(..., validation=True)"
                raise TrainingError(
                    f"{called} was called on some ranks only, after batch {self.batches_trained}\n  fix: call it on "
                    "every rank, outside of `if s.rank == 0:`; one rank suffices after the loop over the loader"
                )
        return Due(
            report=due.report or ends,
            validate=validates,
            checkpoint=due.checkpoint or ends or wants,
            end=ends,
        )

    def _close(self) -> None:
        """The script is done: end its last step, and the training; a collective."""
        if not self._is_open:
            if self._loader is not None and self._loaded is None:
                raise TrainingError(
                    "nothing was trained: the loader of s.loader was not iterated\n"
                    "  fix: write for batch in loader: ..., with the loader that s.loader has returned"
                )
            return
        training, done, is_untouched = self._training, self.batches_trained, self._before == self._counters()
        if self._taken and (is_untouched or self._taken < self._accumulation):
            if not is_untouched:
                left = f"{self._taken} of {self._accumulation} micro-batches of batch {done + 1}"
                training.reporter.note(f"left out    {left}: the script has ended in the middle of it")
            # The last whole step is reported and saved, unless a stream's position is after what was taken.
            due = self._due(training.schedule.due(done), agreed=True, ends=True)
            saves = due.checkpoint and training.data.place is None
            training.do(replace(due, report=training.reporter.take_back_batch() > 0, checkpoint=saves))
        else:
            self._end_step(agreed=True, ends=True)
        training.end(lambda: sums_of_weights(self.context.models))
        if self._is_measured:
            from determined_ds.train.loop.measure import keep_row

            row = training.validator.row()
            keep_row(self._run, row, is_chief=training.is_chief, was_stopped=training.is_stopped)
