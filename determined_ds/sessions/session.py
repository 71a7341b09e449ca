"""``determined_ds.session``: a plain DeepSpeed script with exact resume, preemption, metrics and search.

The way of a step: the script takes a micro-batch from a loader of :meth:`Session.loader`, trains on it, and reports.
When it takes the first one of the next step, the step before has ended, and :class:`Trainer` does what is due after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
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

from determined_ds.checkpoints.safe_load import check_state
from determined_ds.checkpoints.settings import records_of
from determined_ds.config.params import Length
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import CheckpointError, ConfigError, TrainingError
from determined_ds.rundir.signals import HEART
from determined_ds.train.context import MADE
from determined_ds.train.data.loaders import drawn_for, has_state, with_batch_sampler
from determined_ds.train.data.samples import Share, whole_batches
from determined_ds.train.group.process_group import all_ranks_come
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.train.loop.stopping import Due
from determined_ds.train.loop.trainer import Trainer, of_hyperparameters
from determined_ds.train.loop.validation import evaluating
from determined_ds.train.opening import open_context
from determined_ds.train.rank import here
from determined_ds.trial.base import ReconciledTrial
from determined_ds.trial.returned import described, refused

logger = logging.getLogger("determined_ds")
# What a trial writes, or det-ds run takes -> what a script does.
WORDS = {
    MADE: "the engine of s.checkpoint",
    "Script.build_training_data_loader": "s.loader",
    "build_training_data_loader": "s.loader",
    "self.training_loader": "s.loader",
    "self.validation_loader": "s.validation_loader",
    "context.get_train_micro_batch_size_per_gpu()": "s.resolved.batch.micro_batch_size",
    "context.resolved.ds_config": "s.ds_config",
    "context.resolved": "s.resolved",
    "state what is missing": "state hyperparameters.global_batch_size",
    "context.wrap_model_engine(engine)": "s.checkpoint(engine)",
    "add --resume to continue it": "write session(..., resume=True) to continue it",
    "--run-dir ": "run_dir=",
}
# How long a rank that reports a validation, or wants a checkpoint, waits for the others, which have computed the same.
COME_WITHIN_S = 120.0
# Passes that a script may begin after the end of training: for epoch in range(n). More than that has no end.
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

    def in_words_of_scripts(_kind: Any, error: BaseException | None, _traceback: Any) -> None:
        def said(text: str) -> str:
            return functools.reduce(lambda text, words: text.replace(*words), WORDS.items(), text)

        if isinstance(error, ConfigError):
            error.problems = tuple(
                replace(each, key=said(each.key), message=said(each.message), fix=said(each.fix))
                for each in error.problems
            )

    with contextlib.ExitStack() as stack:
        stack.push(in_words_of_scripts)
        ranks, trial = None, here()
        if trial is None:
            from determined_ds.sessions.own_run import own_run  # not sent to a cluster

            own = own_run(config, run_dir, resume, accelerator, lambda: s is not None and s.stop_requested)
            ranks, trial = stack.enter_context(own), here()
            stack.push(in_words_of_scripts)  # before the run records it
        assert trial is not None
        if trial.run is not None:
            trial.run.trained = True
        context = stack.enter_context(open_context(distributed=ranks, accelerator=accelerator))
        s = Session(context, trial.run, stack)
        try:
            yield s
        except SystemExit as error:
            if not error.code:
                s._close()
            raise
        s._close()


class Batches:
    """The data of a script in micro-batches, on the CPU: iterate it once for each pass."""

    def __init__(self, dataset: Any, passes: Callable[[], Iterator[Any]], length: Callable[[], Any]) -> None:
        self.dataset, self._passes, self._length = dataset, passes, length

    def __iter__(self) -> Iterator[Any]:
        return self._passes()

    def __len__(self) -> int:
        """Micro-batches of this rank in a pass; a TypeError where the data has no length."""
        return self._length()  # type: ignore[no-any-return]


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

    Raises:
        ConfigError: by each method, where a script calls it too early, or with what does not fit.
        TrainingError: when a step ends, where the script has not taken or trained all of it on all ranks.
    """

    def __init__(self, context: Any, run: Any, stack: contextlib.ExitStack) -> None:
        self.context, self._run, self._stack, self._script = context, run, stack, Script(context)
        self.device: torch.device = context.device
        self.distributed, self.rank = context.distributed, int(context.distributed.rank)
        self.run_dir: Path | None = None if run is None else run.run_dir
        self._is_measured = run is not None and run.measurement is not None
        self._validated = 0  # samples of the validation data since the last report
        self._length: Length | None = None  # of the training, as the script says
        self._begun = 0  # passes of this process
        self._has_warned = self._wants_checkpoint = False
        # From the first call of s.checkpoint on: a Trainer, the steps that were done before, and what was loaded.
        self._training: Any = None
        self._start, self._marks = 0, None
        # From the first batch on.
        self._is_open = False
        self._batches: Iterator[Any] | None = None
        # The step at hand: the steps and micro-steps of the engines before it, and its micro-batches so far.
        self._before: int | None = None
        self._taken = self._accumulation = 0

    @property
    def hparams(self) -> dict[str, Any]:
        """The hyperparameters of this point, derived ones included."""
        return dict(self.context.get_hparams())

    @property
    def resolved(self) -> ResolvedConfig:
        """What was decided; refused while the batch is not known, before ``s.checkpoint(engine)``."""
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

    def loader(self, dataset: Any, **options: Any) -> Batches:
        """The training data in micro-batches, shuffled; iterating it drives the training.

        Args:
            dataset: With an index, or a stream, as for ``DataParallelTrial.training_loader``; or torch's
                ``DataLoader`` over data with an index, which is split over the replicas here.
            options: Of Determined's ``DataLoader``, or of ``StreamLoader``; not ``batch_size``.

        Returns:
            What to iterate, once a pass.
        """
        if self._script.loader is not None:
            fix = "put the data into one dataset, such as torch.utils.data.ConcatDataset"
            raise refused("s.loader", "was called before: a session has one training loader", fix, "session")
        self._script.loader = functools.cache(lambda: self._made("training_loader", dataset, options))
        return Batches(dataset, self._one_pass, lambda: self._script.length)

    def validation_loader(self, dataset: Any, **options: Any) -> Batches:
        """This replica's share of the validation data, in order; every sample is in one share.

        What the script reports next with ``validation=True`` is weighted by the samples that this rank has taken. With
        a pipeline it yields iterators for ``engine.eval_batch``, each over one micro-batch.

        Args:
            dataset: As for :meth:`loader`. A stream is read whole by every replica.
            options: As for :meth:`loader`.

        Returns:
            What to iterate, once a validation.
        """
        context = self.context
        made = functools.cache(lambda: share_of(self._made("validation_loader", dataset, options), context))

        def one_pass() -> Iterator[Any]:
            self._driven("iterating the validation loader")
            self._pause()
            batches, sizes = made()
            pipelines = context.models if context.use_pipeline_parallel else []
            with evaluating(pipelines) if pipelines else contextlib.nullcontext():
                for engine in pipelines:
                    engine.micro_batches = 1
                for number, batch in enumerate(batches):
                    HEART.beat()
                    self._validated += sizes[number] if sizes is not None else 0
                    loads = context._mpu.should_build_data_loader
                    yield (iter([batch]) if loads else None) if pipelines else batch

        return Batches(dataset, one_pass, lambda: made()[1] and len(made()[1]))

    def _made(self, method: str, dataset: Any, options: Mapping[str, Any]) -> Any:
        """A loader over the dataset, once the batch is known."""
        if not isinstance(dataset, (torch_data.DataLoader, pytorch.DataLoader)):
            return getattr(self._script, method)(dataset, **options)
        if options:
            fix = f"give the dataset: self.{method}(loader.dataset, ...)"
            raise refused(f"self.{method}", "got a loader, and options for another", fix, "session")
        return dataset

    # ------------------------------------------------------------------------------------ steps

    def epochs(self, num: int) -> Iterator[int]:
        """The numbers of the epochs that are left; it ends after a stop request, and at ``fit.max_length``.

        Args:
            num: Epochs in all, >= 1: passes over the data.

        Yields:
            0 .. num - 1.
        """
        training = self._driven("s.epochs")
        self._length = Length(unit="epochs", value=num)
        self._begun = max(self._begun, self._script.passes)
        for epoch in range(self._script.passes, num):
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
        """
        if self._driven("s.steps").fit_options.max_length is None and num is None:
            fix = "write s.steps(1000), or state fit.max_length"
            raise refused("s.steps", "nothing says how long to train", fix, "session")
        if num is not None:
            self._length = Length(unit="batches", value=num)
        for batches in self._steps(num):
            yield batches
            if (taken := self._taken) < self._accumulation:
                said = f"{taken} of {self._accumulation} micro-batches of a step were taken"
                raise TrainingError(f"{said}\n  fix: take all: engine.train_batch(data_iter=batches)")

    def _one_pass(self) -> Iterator[Any]:
        """The micro-batches of a pass over the data; none where it was finished before the checkpoint."""
        self._driven(what := "iterating the loader")
        if self.context.use_pipeline_parallel:
            fix = "write: for batches in s.steps(): engine.train_batch(data_iter=batches)"
            raise refused(what, "a pipeline takes its batches itself", fix, "session")
        self._begun += 1
        if self._begun > self._script.passes:
            for batches in self._steps(in_pass=True):
                yield from batches

    def _steps(self, num: int | None = None, *, in_pass: bool = False) -> Iterator[Any]:
        """The micro-batches of each step that is left, of a pass or of ``num`` in all; first the one before ends."""
        training = self._training
        if training.is_stopped:  # the script was given the chance to end by itself
            raise SystemExit(0)
        if not self._is_open:
            self._open()
        self._end_step(agreed=in_pass)
        per_pass, stated = training.schedule.batches_per_epoch, training.schedule.stated_batches
        if not training.goes_on and self._begun > self.batches_trained + MOST_EMPTY:
            raise SystemExit(0)
        is_later = in_pass and self._begun > self._script.passes + 1 and training.goes_on
        if (
            is_later
            and per_pass
            and self.batches_trained % per_pass
            and not self._has_warned
            and self.rank == 0
        ):
            self._has_warned = True
            logger.warning(
                "warning: a pass over the loader was left before its end, and the next one continues it; a resumed run "
                "counts whole passes. fix: state fit.max_length, or write for batches in s.steps(n)"
            )
        while training.goes_on and (num is None or self.batches_trained < num):
            if self._before is None:
                training.begin_step()
                self._before = self._counted()
            if self._batches is None:
                self._taken = self._accumulation
            yield None if self._batches is None else self._micro_batches(self._batches)
            done = self.batches_trained + 1
            if done in (num, stated) or (in_pass and per_pass and done % per_pass == 0):
                self._pause()
                if self._is_measured and done == stated:
                    raise SystemExit(0)  # what the script would do next is not wanted
                return
            self._end_step(agreed=False)

    def _micro_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        while self._taken < self._accumulation:
            batch = next(batches)
            self._taken += 1
            yield batch

    def _counted(self) -> int:
        return sum(engine.global_steps + engine.micro_steps for engine in self.context.models)

    def _pause(self) -> None:
        """What follows is not training."""
        if self._is_open:
            self._training.reporter.pause()
            for each in self._training.observers if self._before != self._counted() else ():
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
            CheckpointError: the checkpoint to resume from does not fit.
        """
        key, context, run = "s.checkpoint", self.context, self._run
        if self._training is not None:
            if not {id(engine) for engine in engines} <= {id(each) for each in context.models}:
                fix = "give all engines to the first call: s.checkpoint(generator, discriminator)"
                raise refused(key, "got an engine that its first call was not given", fix, "session")
            self._wants_checkpoint = self._wants_checkpoint or self._listens
            return
        for engine in engines or (None,):
            if not isinstance(engine, deepspeed.DeepSpeedEngine):
                message = f"got {described(engine)}; expected an engine of DeepSpeed"
                fix = "engine, *_ = deepspeed.initialize(...); s.checkpoint(engine)"
                raise refused(key, message, fix, "session")
        for name, each in state.items():
            if not has_state(each):
                message = f"{name} is {described(each)}, which has no state_dict and load_state_dict"
                raise refused(key, message, "give it both, or leave it out", "session")
        for engine in engines:
            context.wrap_model_engine(engine)
        if self._is_measured:
            from determined_ds.train.loop.measure import Measuring, check_strategy

            check_strategy(context, made_by="the script", fix="initialize the engine with config=s.ds_config")
            training = Measuring(self._script, context, run.measurement, source="s.report").training
        else:
            stated, training = of_hyperparameters(context.resolved.fit), Trainer(self._script, context)
            fit = replace(stated, validation_period=None, step_zero_validation=False)
            if fit != stated and self.rank == 0:
                names = "fit.validation_period and fit.step_zero_validation"
                logger.warning("warning: %s have no effect in a session, whose script validates", names)
            is_test = run is not None and run.test
            training.prepare(fit, test_mode=is_test, validator=self._script, source="s.report")
        self._stack.enter_context(training.closing)
        self._accumulation = context.resolved.batch.accumulation
        self._script.objects, self._script.training = state, training
        training.checkpoints.parts["script"] = self._script
        training.load(context.resumed_from, run.fork if run is not None else None)
        self._start, self._marks = training.state.batches_trained, marks_of(context.models)
        self._training = training

    def report(self, metrics: Mapping[str, Any], *, validation: bool = False) -> None:
        """Report metrics of a micro-batch, or of a validation.

        Training metrics become means over ranks and over each ``fit.reporting_period``. Validation metrics become means
        over the ranks that report any; each counts the samples that it has taken from a validation loader since its
        last report, or else 1. Both go to where the run's metrics go when the step ends. What is reported before the
        first step of a resumed run was reported then, and is ignored.

        Args:
            metrics: Name -> number, or tensor of one number. A ``loss`` that is not finite stops the training.
            validation: Whether they are of a validation, and ``searcher.metric`` may be among them.
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
            return not self._start
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
        # What the script has done since it was resumed is undone: it was done before.
        if self._start and self._marks != marks_of(self.context.models):
            training.read(self.context.resumed_from)
        elif self._start:
            self._script.restore()
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
        if self._before is None or self._taken < self._accumulation:
            return
        engines, did = self.context.models, ""
        self._before, self._taken = None, 0
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
                said = f"{called} was called on some ranks only, after batch {self.batches_trained}"
                raise TrainingError(f"{said}\n  fix: call it on every rank, outside of `if s.rank == 0:`")
        saves = due.checkpoint or ends or wants
        return Due(report=due.report or ends, validate=validates, checkpoint=saves, end=ends)

    def _close(self) -> None:
        """The script is done: end its last step, and the training; a collective."""
        training = self._training
        if not self._is_open:
            if self._script.loader is not None and not self._start:
                said = "nothing was trained: the loader of s.loader was not iterated"
                raise TrainingError(f"{said}\n  fix: write for batch in loader: ... in the script")
            return
        if self._before is not None and (self._taken < self._accumulation or self._before == self._counted()):
            # The last whole step is reported and saved, unless a stream's position is after what was taken.
            due = self._due(training.schedule.due(self.batches_trained), agreed=True, ends=True)
            saves = due.checkpoint and training.data.place is None
            training.do(replace(due, report=training.reporter.take_back_batch() > 0, checkpoint=saves))
        else:
            self._end_step(agreed=True, ends=True)

        def sums_of_weights() -> list[float]:
            weights = [each for engine in self.context.models for each in engine.module.parameters()]
            return [float(getattr(each, "ds_tensor", each).detach().double().sum()) for each in weights]

        training.end(sums_of_weights)
        if self._is_measured:
            from determined_ds.train.loop.measure import keep_row

            row = training.validator.row()
            keep_row(self._run, row, is_chief=training.is_chief, was_stopped=training.is_stopped)


class Script(ReconciledTrial):
    """What stands for a script where the loop expects a trial, a validator, and a part of each checkpoint.

    The script has built the engines, takes the steps, and validates by itself. ``loader`` makes what reads its training
    data; ``objects``, by name, are saved and restored with the engines; ``passes`` were done before they were restored.
    """

    class_spec = ""  # in a checkpoint: no class builds the model
    loader: Callable[[], Any] | None = None
    is_pending = False  # whether a validation is reported, and not yet reduced
    build_model = build_validation_data_loader = train_batch = evaluate_batch = None  # type: ignore[assignment]

    def __init__(self, context: Any) -> None:
        self.context: Any = context
        self.objects: Mapping[str, Any] = {}
        self.training: Any = None
        self.passes, self._loaded = 0, dict[str, Any]()
        self._sums = MetricSums(context.device, source="s.report")

    @property
    def resolved(self) -> Any:  # type: ignore[override]
        return self.context.resolved

    def build_training_data_loader(self) -> Any:
        if self.loader is None:
            fix = "call loader = s.loader(dataset) before the first step"
            raise refused("s.loader", "there is no training data", fix, "session")
        return self.loader()

    @property
    def length(self) -> int | None:
        """Micro-batches of this rank in a pass over the training data; None where it has no length."""
        batch = self.context.resolved.batch
        steps = whole_batches(self.build_training_data_loader(), batch)
        return None if steps is None else steps * batch.accumulation

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Add what a rank reports of a validation; ``weight``: samples that the values are means over."""
        self._sums.add(metrics, weight)
        self.is_pending = True

    def run(self, _callbacks: list[Any]) -> dict[str, Any]:
        """The means over what all ranks have reported; a collective."""
        self.is_pending = False
        return dict(self._sums.reduce()[0])

    def state_dict(self) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self.objects.items()}
        for name, state in states.items():
            check_state(f"s.checkpoint(..., {name}=...): its state_dict", state)
        per_pass, done = self.training.schedule.batches_per_epoch, self.training.state.batches_trained
        return {"passes": done // per_pass if per_pass else 0, "states": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.passes, self._loaded = state_dict["passes"], state_dict["states"]
        then, now = sorted(self._loaded), sorted(self.objects)
        if then != now:
            raise CheckpointError(
                f"the checkpoint holds the states {then}, and s.checkpoint is given the objects {now}\n"
                "  fix: give s.checkpoint the same objects by the same names, or start anew in another run directory"
            )
        self.restore()

    def restore(self) -> None:
        """Set each object to what the loaded checkpoint holds."""
        for name, state in self._loaded.items():
            self.objects[name].load_state_dict(copy.deepcopy(state))


def share_of(loader: Any, context: Any) -> tuple[Any, Any]:
    """The validation batches of this replica, and the samples in each, None where that is not known.

    Every sample is in one share, so a mean over what all ranks report, weighted by samples, is the mean over all. Under
    ZeRO 3 a forward pass is a collective, so replicas make the same number of them. Data without an index, and data
    with a batch sampler of its own, is read whole by every replica.
    """
    mpu, seed = context._mpu, context.get_trial_seed()
    sampler = loader.batch_sampler if isinstance(loader, pytorch.DataLoader) else None
    if type(sampler) is not torch_data.BatchSampler:
        whole = Share(loader, length_of=len, replica=0, replicas=1, seed=seed)
        return whole, whole.sizes
    with drawn_for(sampler, seed, 0):
        order = [sample for batch in sampler for sample in batch]
    replicas = mpu.data_parallel_world_size if len(order) >= mpu.data_parallel_world_size else 1
    parts = replicas * min(-(-len(order) // (replicas * sampler.batch_size)), len(order) // replicas)
    cuts = [len(order) * index // parts for index in range(parts + 1)] if parts else []
    own = [order[start:end] for start, end in itertools.pairwise(cuts)][
        mpu.data_parallel_rank % replicas :: replicas
    ]
    return with_batch_sampler(loader, own, 0), [len(batch) for batch in own]


def marks_of(engines: list[Any]) -> Any:
    """What differs once anything has changed weights, optimizer settings or a schedule of an engine."""
    records = [{key: each[key] for key in ("groups", "scheduler")} for each in records_of(engines)]
    weights = [each for engine in engines for each in engine.module.parameters()]
    return records, [getattr(each, "ds_tensor", each)._version for each in weights]
