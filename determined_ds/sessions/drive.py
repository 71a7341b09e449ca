"""Drives a training by what a script takes: its steps, its passes over the data, and what a checkpoint holds of it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.checkpoints.safe_load import check_state
from determined_ds.checkpoints.settings import records_of
from determined_ds.config.params import Length
from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError
from determined_ds.train.group.process_group import all_ranks_come
from determined_ds.train.here import ScriptRun
from determined_ds.train.loop.metrics import MetricSums
from determined_ds.train.loop.stopping import Due
from determined_ds.train.loop.trainer import Training
from determined_ds.trial.base import ReconciledTrial

# How long a rank that reports a validation, or wants a checkpoint, waits for the others, which have computed the same.
COME_WITHIN_S = 120.0
# Passes that a script may begin after the end of training: for epoch in range(n). One that begins more never ends.
MOST_EMPTY = 1000


class ScriptTrial(ReconciledTrial):
    """Stands for a script where a trial is expected: the script has built the engines, and takes the steps.

    Attributes:
        loader: The script's training data, whose ``loader`` is read.
    """

    loader: Any = None
    class_spec = ""  # in a checkpoint: no class builds the model

    def __init__(self, context: Any) -> None:
        self.context: Any = context

    @property
    def resolved(self) -> Any:  # type: ignore[override]
        """What was decided, or adopted from the first engine."""
        return self.context.resolved

    def build_training_data_loader(self) -> Any:
        """The script's."""
        return self.loader.loader

    def _by_script(self, *_: Any) -> NoReturn:
        raise NotImplementedError("the script builds its model, trains it and validates it")

    build_model = build_validation_data_loader = train_batch = evaluate_batch = _by_script  # type: ignore[assignment]


class ReportedValidation:
    """The metrics of a validation that a script reports, in place of a validation that the loop runs.

    Attributes:
        is_pending: Whether any were reported since the last one.
    """

    dataset = None

    def __init__(self, context: Any) -> None:
        warned: set[str] | None = set() if context.distributed.rank == 0 else None
        self._sums = MetricSums(context.device, source="s.report", warned=warned)
        self.is_pending = False

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Add what a rank reports; ``weight``: samples that the values are means over."""
        self._sums.add(metrics, weight)
        self.is_pending = True

    def run(self, _callbacks: list[Any]) -> dict[str, Any]:
        """The means over what all ranks have reported; a collective."""
        self.is_pending = False
        return dict(self._sums.reduce()[0])


class Drive:
    """Drives a training by what the script takes; a part of each checkpoint.

    A step lasts until the next batch is taken: what the script does after ``engine.step()``, a validation included,
    belongs to it, and is in its checkpoint. So a run always resumes where a batch is taken. At the end of a pass the
    next batch is that of the next pass, and at the end of training there is none: there the step ends with the
    session.

    Args:
        training: What is driven.
        objects: What the script has handed over, by name.
        run: The run of the script; None on a cluster.
        latest: The checkpoint to resume from.
        fork: Folder of a checkpoint of another run to start from.
    """

    def __init__(
        self,
        training: Training,
        objects: Mapping[str, Any],
        run: ScriptRun | None,
        latest: str | None,
        fork: Path | None,
    ) -> None:
        self.training = training
        self._context = training.context
        self._objects = dict(objects)
        self._run = run
        self._accumulation = self._context.resolved.batch.accumulation
        self._found: dict[str, Any] = {}  # what the loaded checkpoint holds
        training.checkpoints.parts["script"] = self
        training.load(latest, fork)
        self._loaded = latest if training.state.batches_trained else None
        self._marks = self._engine_marks()
        self._batches: Iterator[Any] | None = None
        self._is_open = False
        # The step at hand: its micro-batches so far, and (steps, micro-steps) of each engine before it.
        self._taken = 0
        self._before: list[tuple[int, int]] = []
        self._first: list[tuple[int, int]] = []  # before the first step of this process
        self._wanted_at = ""  # file and line of an s.checkpoint() in it
        # The passes over the data: of this process and before.
        self._done = int(self._found.get("passes", 0))
        self._begun = 0  # by this process; those that are done are begun again, and are empty
        self._number = self._done - 1  # of the one begun last
        self._is_unfinished = False  # that one, as a checkpoint would hold it now
        self._is_cut = False  # by the end of training
        self._empty = 0  # begun after the end of training
        self._length: Length | None = None  # of the training, as the script says
        self._epoch = int(self._found.get("epochs", 0))
        self._in_epochs = False
        self._passes_before_epoch = int(self._found.get("before_epoch", 0))

    @property
    def was_driven(self) -> bool:
        """Whether a batch was taken, here or before."""
        return self._loaded is not None or self._is_open

    @property
    def _has_step(self) -> bool:
        """Whether all of a step was taken, and the step has not ended."""
        return self._taken == self._accumulation

    @property
    def _is_over(self) -> bool:
        return self._is_open and not self.training.goes_on

    def _counters(self) -> list[tuple[int, int]]:
        return [(engine.global_steps, engine.micro_steps) for engine in self._context.models]

    # ------------------------------------------------------------------------------------ in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The objects of the script, what it has finished, and the modes of its modules."""
        states = {name: each.state_dict() for name, each in self._objects.items()}
        for name, state in states.items():
            check_state(f"s.checkpoint(..., {name}=...): its state_dict", state)
        finished = not self._is_unfinished
        return {
            "passes": self._number + finished,
            "epochs": self._epoch + (self._in_epochs and finished),
            "before_epoch": self._number + 1 if finished else self._passes_before_epoch,
            "states": states,
            "modes": [[module.training for module in each.module.modules()] for each in self._context.models],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the objects; the rest is taken once training begins."""
        self._found = dict(state_dict)
        then, now = set(self._found.get("states", {})), set(self._objects)
        differing = [f"it holds no state of {name}" for name in sorted(now - then)]
        differing += [
            f"it holds a state of {name}, which s.checkpoint is not given" for name in sorted(then - now)
        ]
        if differing:
            raise CheckpointError(
                f"the checkpoint does not fit the objects of s.checkpoint: {'; '.join(differing)}\n"
                "  fix: give s.checkpoint the same objects by the same names, or start anew in another run directory"
            )
        self._restore_objects()

    def _restore_objects(self) -> None:
        for name, state in self._found.get("states", {}).items():
            self._objects[name].load_state_dict(copy.deepcopy(state))

    def _restore_modes(self) -> None:
        """Set each module to training or evaluation, as the script had left it."""
        for engine, flags in zip(self._context.models, self._found.get("modes", ()), strict=False):
            for module, flag in zip(engine.module.modules(), flags, strict=False):
                module.training = flag

    def _engine_marks(self) -> Any:
        """What differs once anything has changed weights, optimizer settings or a schedule of an engine."""
        engines = self._context.models
        records = [{key: each[key] for key in ("groups", "scheduler")} for each in records_of(engines)]
        weights = [each for engine in engines for each in engine.module.parameters()]
        return records, [getattr(each, "ds_tensor", each)._version for each in weights]

    # ------------------------------------------------------------------------------------ what the script takes

    def one_pass(self) -> Iterator[Any]:
        """The micro-batches of a pass over the data; none where it was finished before the checkpoint."""
        number, self._begun = self._begun, self._begun + 1
        if number >= self._done:
            for _ in self._each_step(number=number):
                yield from self._of_step()

    def epochs(self, num: int) -> Iterator[int]:
        """The epochs that are not finished, until the end of training or a stop."""
        self._length = Length(unit="epochs", value=num)
        self._in_epochs = True
        if self._loaded is not None:
            self._begun = max(self._begun, self._passes_before_epoch)
        left = range(self._epoch, num)
        for self._epoch in left:
            if self._is_over:
                return
            self._passes_before_epoch = self._begun
            yield self._epoch
            if self._epoch + 1 < num:
                self._end_step(agreed=True)

    def steps(self, num: int | None) -> Iterator[Any]:
        """For each step that is left, an iterator over its micro-batches; None on ranks that load none."""
        if num is not None:
            self._length = Length(unit="batches", value=num)
        for _ in self._each_step(num=num):
            if self._batches is None:
                self._begin_step()
                self._taken = self._accumulation
                yield None
                continue
            yield self._of_step()
            if not self._has_step:
                raise TrainingError(
                    f"{self._taken} of {self._accumulation} micro-batches of a step were taken\n  fix: take all of "
                    "them: engine.train_batch(data_iter=batches) for each iterator of s.steps()"
                )

    def _each_step(self, *, number: int | None = None, num: int | None = None) -> Iterator[None]:
        """Stop at each step that is to be taken, once the one before it has ended.

        Args:
            number: Of the pass that it takes the steps of, to the end of the data; None: it takes them without passes.
            num: Steps of the training in all.

        Raises:
            SystemExit: it begins after a stop, or as one of very many passes after the end of training; or all that is
                measured was.
        """
        if self.training.is_stopped:  # the script was given the chance to end by itself
            raise SystemExit(0)
        self._open()
        schedule, is_new = self.training.schedule, number is not None
        while True:
            if number is not None and not self._is_cut:
                self._number, self._is_unfinished = number, True
            self._end_step(agreed=is_new)
            self._is_unfinished = self._is_cut
            done = self.training.state.batches_trained
            if self._is_over or (num is not None and done >= num):
                self._empty += is_new
                if (
                    self._empty > MOST_EMPTY
                ):  # the script iterates the loader for ever, though training is over
                    raise SystemExit(0)
                return
            is_new = False
            yield
            is_whole = number is not None and (done + 1) % (schedule.batches_per_epoch or sys.maxsize) == 0
            if is_whole or done + 1 in (num, schedule.stated_batches):
                self._is_cut = self._is_unfinished = number is not None and not is_whole
                self.pause()
                if self.training.measure is not None and done + 1 == schedule.stated_batches:
                    raise SystemExit(0)  # what the script would do next is not wanted
                return

    def _of_step(self) -> Iterator[Any]:
        while not self._has_step:
            yield self._take()

    def _take(self) -> Any:
        if not self._taken:
            self._begin_step()
        assert self._batches is not None, "every rank but a pipeline's loads"
        batch = next(self._batches)
        self._taken += 1
        return batch

    def _begin_step(self) -> None:
        self.training.begin_step()
        self._before = self._counters()
        self._first = self._first or self._before

    def pause(self) -> None:
        """What follows is not training."""
        if not self._is_open:
            return
        training = self.training
        training.reporter.pause()
        has_stepped = any(now[0] > then[0] for now, then in zip(self._counters(), self._before, strict=False))
        for part in (training.capture, training.measure):
            if has_stepped and part is not None:
                part.stop()

    def report(self, metrics: Any, *, validation: bool, weight: float) -> None:
        """Take metrics of the step at hand; those of what was done before are ignored."""
        if not self._listens:
            return
        if not validation:
            self.training.take(metrics)
        elif self.training.measure is None:  # else what was measured is reported in its place
            self.training.validator.add(metrics, weight)

    def request_checkpoint(self, place: str) -> None:
        """Have a checkpoint written when the step ends; ``place`` is the file and line that wants it."""
        if self._listens:
            self._wanted_at = place

    @property
    def _listens(self) -> bool:
        """Whether a report belongs to a step: not before the first one of a resumed run, nor after the last one."""
        if not self._is_open:
            return self._loaded is None
        return self._has_step or self.training.goes_on

    # ------------------------------------------------------------------------------------ begin, end, between steps

    def _open(self) -> None:
        if self._is_open:
            return
        training = self.training
        if self._loaded is not None:  # what the script has done since then is undone: it was done before
            if self._marks != self._engine_marks():
                training.read(self._loaded)
            else:
                self._restore_objects()
        if training.fit.max_length is None:
            training.fit = replace(training.fit, max_length=self._length)
        gather, validator = self._context.distributed.allgather, training.validator
        self._batches = training.begin(self._restore_modes, lambda: any(gather(validator.is_pending)))
        if training.schedule.stated_batches is None and training.schedule.batches_per_epoch is None:
            message = "the training data has no length, so nothing says when a pass over it ends"
            fix = "state fit.max_length: {batches: 1000}, or give the dataset a __len__"
            raise ConfigError(Problem(key="s.loader", message=message, fix=fix, code="epochs-without-length"))
        self._is_open = True

    def _end_step(self, *, agreed: bool, ends: bool = False) -> None:
        """End the step at hand, if all of it was taken; a collective where anything is due.

        Args:
            agreed: All ranks know that a validation may have been reported after this step.
            ends: It is the last one of the training.
        """
        if not self._has_step:
            return
        self._taken = 0
        engines = self._context.models
        if [steps for steps, _ in self._first] == [engine.global_steps for engine in engines]:
            raise TrainingError(
                "the loader is asked for the next batch, and no engine has made a step with the last one\n"
                "  fix: call engine.backward(loss) and engine.step() for each micro-batch"
            )
        for engine in engines:
            accumulation, micro_steps = engine.gradient_accumulation_steps(), engine.micro_steps
            if not self._context.use_pipeline_parallel and micro_steps % accumulation:
                raise TrainingError(
                    f"the engine was stepped {micro_steps} times, in the middle of an accumulation of {accumulation} "
                    "micro-batches, where the loader has given all of them\n  fix: call engine.backward(loss) and "
                    "engine.step() once for each micro-batch of the loader"
                )
        self.training.end_step(lambda due: self._due(due, agreed=agreed, ends=ends))

    def _due(self, due: Due, *, agreed: bool, ends: bool) -> Due:
        """What is due at the end of a step, with what the script wants; a collective where all ranks know of it.

        In the middle of a pass they do not, and asking at each step would cost time: every rank has to want the same.

        Raises:
            TrainingError: only some ranks report a validation, or want a checkpoint, and would wait for the others.
        """
        ends, batch, called = due.end or ends, self.training.state.batches_trained, ""
        validate, (place, self._wanted_at) = self.training.validator.is_pending, (self._wanted_at, "")
        if agreed or due.validate or ends:
            ranks = self._context.distributed.allgather((validate, place))
            validate, places = any(reported for reported, _ in ranks), [each for _, each in ranks]
            place = next(filter(None, places), "")
            if place and not (all(places) or due.checkpoint or ends):
                called = f"{place}: s.checkpoint()"
        elif (validate or place) and not all_ranks_come(
            f"script/{batch}/{validate}/{bool(place)}", within_s=COME_WITHIN_S
        ):
            called = f"{place}: s.checkpoint()" if place else "s.report(..., validation=True)"
        if called:
            raise TrainingError(
                f"{called} was called on some ranks only, after batch {batch}\n  fix: call it on every rank, outside "
                "of `if s.rank == 0:`; a validation may be reported by one rank after the loop over the loader"
            )
        checkpoint = due.checkpoint or ends or bool(place)
        return Due(report=due.report or ends, validate=validate, checkpoint=checkpoint, end=ends)

    def close(self) -> None:
        """The script is done: end its last step, and the training; a collective."""
        if not self._is_open:
            return
        training, is_untouched = self.training, self._before == self._counters()
        if self._taken and (is_untouched or not self._has_step):
            if not is_untouched:
                training.progress.note(
                    f"left out    {self._taken} of {self._accumulation} micro-batches of batch "
                    f"{self.training.state.batches_trained + 1}: the script has ended in the middle of it"
                )
            # The last whole step is reported and saved, unless a stream's position is after what was taken.
            due = self._due(
                training.schedule.due(self.training.state.batches_trained), agreed=True, ends=True
            )
            saves = due.checkpoint and training.data.of is None
            training.do(replace(due, report=training.reporter.take_back_batch() > 0, checkpoint=saves))
        else:
            self._end_step(agreed=True, ends=True)
        training.end(self._sums_of_weights)
        if training.measure is not None and self._run is not None:
            from determined_ds.train.loop.measure import keep_row

            row = training.measure.row(training)
            keep_row(self._run, row, is_chief=training.is_chief, was_stopped=self.training.is_stopped)

    def _sums_of_weights(self) -> dict[str, float]:
        """What a tested checkpoint is proved by."""
        return {
            f"{index}/{name}": float(getattr(parameter, "ds_tensor", parameter).detach().double().sum())
            for index, engine in enumerate(self._context.models)
            for name, parameter in engine.module.named_parameters()
        }
