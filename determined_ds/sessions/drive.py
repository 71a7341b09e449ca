"""Drives a training by what a script takes, and keeps what a checkpoint holds of the script."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

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

# How long a rank that reports a validation waits for the others to report theirs, where nothing else says that one is
# due. They have computed the same.
COME_WITHIN_S = 120.0
# Passes that a script may begin after the end of training: for epoch in range(n). One that begins more never ends.
MOST_EMPTY = 1000


class ScriptTrial(ReconciledTrial):
    """Stands for a script where a trial is expected: the script has built the engines, and takes the steps.

    Attributes:
        loader: The script's training data, whose ``loader`` is read.
    """

    loader_names: ClassVar[dict[str, str]] = {
        "training_loader": "s.loader",
        "validation_loader": "s.validation_loader",
    }
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

    def build_validation_data_loader(self) -> Any:
        """None: the script validates."""

    def build_model(self) -> NoReturn:
        """Never called, as the two below."""
        raise NotImplementedError("the script builds its model")

    def train_batch(self, *_: Any) -> NoReturn:
        raise NotImplementedError("the script trains")

    def evaluate_batch(self, *_: Any) -> NoReturn:
        raise NotImplementedError("the script validates")


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


class ScriptState:
    """What a checkpoint holds of a script: objects that it has handed over, its position, the modes of its modules.

    Attributes:
        position: Returns how many passes and epochs the script has finished.
        found: What the loaded checkpoint holds; empty without one.
    """

    def __init__(self, engines: list[Any], objects: Mapping[str, Any]) -> None:
        self._engines = engines
        self._objects = dict(objects)
        self.position: Callable[[], dict[str, int]] = dict
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self._objects.items()}
        for name, state in states.items():
            check_state(f"s.checkpoint(..., {name}=...): its state_dict", state)
        modes = [[module.training for module in engine.module.modules()] for engine in self._engines]
        return {**self.position(), "states": states, "modes": modes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.found = dict(state_dict)
        then, now = set(self.found.get("states", {})), set(self._objects)
        differing = [f"it holds no state of {name}" for name in sorted(now - then)]
        differing += [
            f"it holds a state of {name}, which s.checkpoint is not given" for name in sorted(then - now)
        ]
        if differing:
            raise CheckpointError(
                f"the checkpoint does not fit the objects of s.checkpoint: {'; '.join(differing)}\n"
                "  fix: give s.checkpoint the same objects by the same names, or start anew in another run directory"
            )
        self.restore()

    def restore(self) -> None:
        """Give every object the state that was found, again: the script may have changed it since."""
        for name, state in self.found.get("states", {}).items():
            self._objects[name].load_state_dict(copy.deepcopy(state))

    def restore_modes(self) -> None:
        """Set each module to training or evaluation, as the script had left it."""
        for engine, flags in zip(self._engines, self.found.get("modes", ()), strict=False):
            for module, flag in zip(engine.module.modules(), flags, strict=False):
                module.training = flag


class Pass:
    """A pass over the training data, iterated by the script; ``number`` counts all that it has begun, before too."""

    def __init__(self, drive: Drive, number: int) -> None:
        self._drive = drive
        self.number = number
        self.is_over = False
        self.is_whole = False  # it is over because the data is at its end

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        return self._drive.fetch(self)


class Drive:
    """Drives a training by what the script takes.

    A step lasts until the next batch is taken: what the script does after ``engine.step()``, a validation included,
    belongs to it, and is in its checkpoint. So a run always resumes where a batch is taken. At the end of a pass the
    next batch is that of the next pass, and at the end of training there is none: there the step ends with the
    session.
    """

    def __init__(
        self,
        training: Training,
        script: ScriptState,
        run: ScriptRun | None,
        checkpoint: tuple[str | None, Path | None],
    ) -> None:
        self._training = training
        self._context = training.context
        self._script = script
        self._run = run
        training.checkpoints.parts["script"] = script
        training.load(*checkpoint)
        self._resumed = training.state.batches_trained > 0
        self._loaded = checkpoint[0] if self._resumed else None
        self._marks = self._engine_marks()
        self._accumulation = self._context.resolved.batch.accumulation
        self._batches: Iterator[Any] | None = None
        self._is_open = False
        self._taken = 0  # micro-batches of the step at hand
        self._steps: list[int] = []  # of the engines, before the first
        self._before: list[
            tuple[int, int]
        ] = []  # steps and micro-steps of the engines, before the step at hand
        self._wanted_at = ""  # file and line of s.checkpoint(), where the step at hand has called it
        self._length: Length | None = None  # as the script says
        self._begun = 0  # passes
        self._pass: Pass | None = None
        self._fetches = False
        self._cut: int | None = None  # number of the pass that the end of training has cut
        self._empty = 0  # passes begun after the end of training
        position = {name: value for name, value in script.found.items() if isinstance(value, int)}
        self._done = position.get("passes", 0)
        self._epoch = position.get("epochs", 0)
        self._in_epochs = False
        self._begun_before_epoch = position.get("before_epoch", 0)
        script.position = self._position

    @property
    def batches_trained(self) -> int:
        """Optimizer steps since the start of training, in this process or before."""
        return self._training.state.batches_trained

    @property
    def is_stopped(self) -> bool:
        """Whether a stop was requested, and its checkpoint is written."""
        return self._training.is_stopped

    @property
    def was_driven(self) -> bool:
        """Whether a batch was taken, here or before."""
        return self._resumed or self._is_open

    @property
    def states_length(self) -> bool:
        """Whether the configuration says how long to train."""
        return self._training.fit.max_length is not None

    @property
    def _has_step(self) -> bool:
        """Whether all of a step was taken, and the step has not ended."""
        return self._taken == self._accumulation

    @property
    def _listens(self) -> bool:
        """Whether a report belongs to a step: not before the first one of a resumed run, nor after the last one."""
        is_replaying = self._resumed and not self._is_open
        return not is_replaying and (self._has_step or not self._is_open or self._training.goes_on)

    def pause(self) -> None:
        """What follows is not training."""
        if not self._is_open:
            return
        self._training.reporter.pause()
        has_stepped = any(
            now > then for (now, _), (then, _) in zip(self._counters(), self._before, strict=False)
        )
        if has_stepped and self._training.capture is not None:
            self._training.capture.stop()
        if has_stepped and self._training.measure is not None:
            self._training.measure.stop()

    def _counters(self) -> list[tuple[int, int]]:
        return [(engine.global_steps, engine.micro_steps) for engine in self._context.models]

    def _position(self) -> dict[str, int]:
        """What the script has finished, as a checkpoint holds it."""
        passes, epochs, before = self._done, self._epoch, self._begun_before_epoch
        if self._cut is not None:
            passes = self._cut
        elif self._pass is not None:
            at_hand = self._fetches  # one that the script has left early is finished
            passes = self._pass.number + (not at_hand)
            epochs += self._in_epochs and not at_hand
            before = before if at_hand else self._pass.number + 1
        return {"passes": passes, "epochs": epochs, "before_epoch": before}

    # ------------------------------------------------------------------------------------ passes

    def new_pass(self) -> Pass:
        """Begin a pass; one that was finished before the checkpoint is empty."""
        self._begun += 1
        return Pass(self, self._begun - 1)

    def epochs(self, num: int) -> Iterator[int]:
        """The epochs that are not finished, until the end of training or a stop."""
        self._length = Length(unit="epochs", value=num)
        self._in_epochs = True
        if self._resumed:
            self._begun = max(self._begun, self._begun_before_epoch)
        while self._epoch < num and not (self._is_open and not self._training.goes_on):
            self._begun_before_epoch = self._begun
            yield self._epoch
            if self._epoch + 1 < num:
                self._end_step(agreed=True)
            if self._is_open and not self._training.goes_on:
                return
            if self._epoch + 1 == num:
                return
            self._epoch += 1

    def fetch(self, one: Pass) -> Any:
        """The next micro-batch of a pass; first of all, end the step before it.

        Raises:
            StopIteration: the pass is over, training is at its end, or a stop was requested.
            SystemExit: a pass was begun after a stop, or very many after the end of training; or all that is measured
            was.
        """
        if one.is_over or one.number < self._done:
            raise StopIteration
        is_new = one is not self._pass
        if is_new:
            self._leave_after_stop()
            if self._pass is not None:
                self._pass.is_over = True
            self._pass = one
        elif self._has_step and self._is_last(one):
            one.is_over = True
            self._cut = None if one.is_whole else one.number
            self.pause()
            self._leave_at_end()
            raise StopIteration
        self._open()
        self._fetches = True
        self._end_step(agreed=is_new)
        self._fetches = False
        if not self._training.goes_on:
            one.is_over = True
            self._empty += is_new
            if self._empty > MOST_EMPTY:  # the script iterates the loader for ever, though training is over
                raise SystemExit(0)
            raise StopIteration
        return self._take()

    def _is_last(self, one: Pass) -> bool:
        """Whether the step at hand is the last one of a pass, or of training."""
        schedule, done = self._training.schedule, self.batches_trained + 1
        one.is_whole = done % (schedule.batches_per_epoch or sys.maxsize) == 0
        return one.is_whole or done >= schedule.num_batches

    def _take(self) -> Any:
        if not self._taken:
            self._begin_step()
        assert self._batches is not None, "every rank but a pipeline's loads"
        batch = next(self._batches)
        self._taken += 1
        return batch

    def _begin_step(self) -> None:
        self._training.begin_step()
        self._before = self._counters()
        self._steps = self._steps or [steps for steps, _ in self._before]

    def steps(self, num: int | None) -> Iterator[Any]:
        """For each step that is left, an iterator over its micro-batches; None on ranks that load none."""
        if num is not None:
            self._length = Length(unit="batches", value=num)
        self._leave_after_stop()
        self._open()
        while True:
            self._end_step(agreed=False)
            if not self._training.goes_on or (num is not None and self.batches_trained >= num):
                return
            if self._batches is None:
                self._begin_step()
                self._taken = self._accumulation
                yield None
            else:
                yield self._of_step()
                if not self._has_step:
                    raise TrainingError(
                        f"{self._taken} of {self._accumulation} micro-batches of a step were taken\n  fix: take all of "
                        "them: engine.train_batch(data_iter=batches) for each iterator of s.steps()"
                    )
            if self.batches_trained + 1 in (num, self._training.schedule.stated_batches):
                self.pause()
                self._leave_at_end()
                return

    def _of_step(self) -> Iterator[Any]:
        while not self._has_step:
            yield self._take()

    def _leave_after_stop(self) -> None:
        """End a script that trains on after a stop; it was given the chance to end by itself."""
        if self.is_stopped:
            raise SystemExit(0)

    def _leave_at_end(self) -> None:
        """End a script that is measured with its last step: what it would do next is not wanted."""
        is_last = self.batches_trained + 1 == self._training.schedule.stated_batches
        if is_last and self._training.measure is not None:
            raise SystemExit(0)

    # ------------------------------------------------------------------------------------ begin, end, between steps

    def _engine_marks(self) -> Any:
        """What differs once anything has changed weights, optimizer settings or a schedule of an engine."""
        engines = self._context.models
        records = [{key: each[key] for key in ("groups", "scheduler")} for each in records_of(engines)]
        versions = [
            [getattr(each, "ds_tensor", each)._version for each in engine.module.parameters()]
            for engine in engines
        ]
        return records, versions

    def _open(self) -> None:
        if self._is_open:
            return
        training = self._training
        if (
            self._loaded is not None
        ):  # what the script has done since is undone: its checkpoint comes after that
            if self._marks != self._engine_marks():
                training.read(self._loaded)
            else:
                self._script.restore()
        if training.fit.max_length is None:
            training.fit = replace(training.fit, max_length=self._length)
        gather, validator = self._context.distributed.allgather, training.validator
        self._batches = training.begin(self._script.restore_modes, lambda: any(gather(validator.is_pending)))
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
        if self._steps == [engine.global_steps for engine in engines]:
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
        self._training.end_step(lambda due: self._due(due, agreed=agreed, ends=ends))

    def _due(self, due: Due, *, agreed: bool, ends: bool) -> Due:
        """What is due at the end of a step, with what the script wants; a collective where all ranks know of it.

        Raises:
            TrainingError: only some ranks report a validation, or want a checkpoint, and would wait for the others.
        """
        ends = due.end or ends
        agreed = agreed or due.validate or ends
        batch, gather = self.batches_trained, self._context.distributed.allgather
        validate, (place, self._wanted_at) = self._training.validator.is_pending, (self._wanted_at, "")
        if agreed:
            validate = any(gather(validate))
        elif validate and not all_ranks_come(f"validation/{batch}", within_s=COME_WITHIN_S):
            raise TrainingError(
                f"s.report(..., validation=True) was called on some ranks only, after batch {batch}, in the middle of "
                "a pass\n  fix: call it on every rank, or after the loop over the loader"
            )
        checkpoint = due.checkpoint or ends
        if not checkpoint:
            if agreed:
                places = gather(place)
                place, everywhere = next(filter(None, places), ""), all(places)
            else:
                everywhere = not place or all_ranks_come(f"checkpoint/{batch}", within_s=COME_WITHIN_S)
            if place and not everywhere:
                raise TrainingError(
                    f"{place}: s.checkpoint() was called on some ranks only, after batch {batch}\n  fix: call it on "
                    "every rank, outside of `if s.rank == 0:`; each saves its part"
                )
            checkpoint = bool(place)
        return Due(report=due.report or ends, validate=validate, checkpoint=checkpoint, end=ends)

    def close(self) -> None:
        """The script is done: end its last step, and the training; a collective."""
        if not self._is_open:
            return
        training, is_untouched = self._training, self._before == self._counters()
        if self._taken and (is_untouched or not self._has_step):
            if not is_untouched:
                training.progress.note(
                    f"left out    {self._taken} of {self._accumulation} micro-batches of batch "
                    f"{self.batches_trained + 1}: the script has ended in the middle of it"
                )
            # The last whole step is reported and saved, unless a stream's position is after what was taken.
            due = self._due(training.schedule.due(self.batches_trained), agreed=True, ends=True)
            saves = due.checkpoint and training.data.of is None
            training.do(replace(due, report=training.reporter.take_back_batch() > 0, checkpoint=saves))
        else:
            self._end_step(agreed=True, ends=True)
        training.end(self._sums_of_weights)
        if training.measure is not None and self._run is not None:
            from determined_ds.train.loop.measure import keep_row

            row = training.measure.row(training)
            keep_row(self._run, row, is_chief=training.is_chief, was_stopped=self.is_stopped)

    def _sums_of_weights(self) -> dict[str, float]:
        """What a tested checkpoint is proved by."""
        found: dict[str, float] = {}
        for index, engine in enumerate(self._context.models):
            for name, parameter in engine.module.named_parameters():
                own = getattr(parameter, "ds_tensor", parameter).detach()
                found[f"{index}/{name}"] = float(own.double().sum())
        return found

    def report(self, metrics: Any, *, validation: bool, weight: float) -> None:
        """Take metrics of the step at hand; those of what was done before are ignored."""
        if not self._listens:
            return
        if not validation:
            self._training.take(metrics)
        elif self._training.measure is None:  # else what was measured is reported in its place
            self._training.validator.add(metrics, weight)

    def request_checkpoint(self, place: str) -> None:
        """Have a checkpoint written when the step ends; ``place`` is the file and line that wants it."""
        if self._listens:
            self._wanted_at = place
