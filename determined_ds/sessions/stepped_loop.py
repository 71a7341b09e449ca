"""The training loop, driven by a script that takes the steps itself, and the trial that stands for the script."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from determined_ds.checkpoints.safe_load import check_state
from determined_ds.checkpoints.settings import records_of
from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError
from determined_ds.train.group.collectives import all_ranks_come
from determined_ds.train.loop.boundaries import Due
from determined_ds.train.loop.loop import TrainingLoop
from determined_ds.train.loop.metric_sums import MetricSums
from determined_ds.train.loop.progress import Progress
from determined_ds.train.loop.proof import prove_checkpoint
from determined_ds.train.loop.settings import LoopOptions
from determined_ds.trial.base import ReconciledTrial

# How long a rank that reports a validation waits for the others to report theirs, where nothing else says that one is
# due. They have computed the same.
COME_WITHIN_S = 120.0


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

    Args:
        device: Of the training.
        warned: Names of metrics that a warning has named; None: no warnings.
    """

    dataset = None

    def __init__(self, device: torch.device, warned: set[str] | None) -> None:
        self._sums = MetricSums(device, source="s.report", warned=warned)
        self.is_pending = False

    def add(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Add what a rank reports; ``weight``: samples that the values are means over."""
        self._sums.add(metrics, weight)
        self.is_pending = True

    def run(self, _callbacks: list[Any]) -> dict[str, Any]:
        """The means over what all ranks have reported; a collective."""
        self.is_pending = False
        return dict(self._sums.reduce())


class ScriptState:
    """What a checkpoint holds of a script: objects that it has handed over, its position, the modes of its modules.

    Args:
        engines: The engines.
        position: Returns how many passes and epochs the script has finished.
        objects: Name -> object with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self, engines: list[Any], position: Callable[[], dict[str, int]], objects: Mapping[str, Any]
    ) -> None:
        self._engines = engines
        self._position = position
        self._objects = dict(objects)
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self._objects.items()}
        for name, state in states.items():
            check_state(f"s.checkpoint(..., {name}=...): its state_dict", state)
        return {**self._position(), "states": states, "modes": self._modes()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.found = dict(state_dict)
        self._check_names()
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

    def _modes(self) -> list[list[bool]]:
        return [[module.training for module in engine.module.modules()] for engine in self._engines]

    def _check_names(self) -> None:
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


class SteppedLoop(TrainingLoop):
    """The loop of a script.

    Args:
        trial: Stands for the script.
        context: Its context.
        options: How.
        progress: What the chief shows.
        state: What a checkpoint holds of the script.

    Attributes:
        ends_script: Whether the script is ended after the last step of the stated length.
    """

    ends_script: ClassVar[bool] = False

    def __init__(
        self, trial: ScriptTrial, context: Any, options: LoopOptions, progress: Progress, state: ScriptState
    ) -> None:
        super().__init__(trial, context, options, progress)
        self._script = state
        self._checkpoints.add_part("script", state)
        self._loaded: str | None = None
        self._marks: Any = None
        self.wanted_at = ""  # file and line of s.checkpoint(), where the step at hand has called it
        self._steps: list[int] = []
        self._before: list[tuple[int, int]] = []

    @property
    def batches_trained(self) -> int:
        """Optimizer steps since the start of training, in this process or before."""
        return self._state.batches_trained

    @property
    def is_stopped(self) -> bool:
        """Whether a stop was requested, and its checkpoint is written."""
        return self._is_stopped

    @property
    def length(self) -> int | None:
        """Steps from the start of training to its end; None where only the script knows."""
        return None if self._schedule.max_length is None else self._schedule.num_batches

    @property
    def states_length(self) -> bool:
        """Whether the configuration says how long to train."""
        return self._options.lengths["max_length"] is not None

    @property
    def per_pass(self) -> int:
        """Steps in a pass over the data."""
        return self._schedule.batches_per_epoch or sys.maxsize

    # ------------------------------------------------------------------------------------ begin

    def load(self, latest_checkpoint: str | None, fork: Path | None = None) -> None:
        super().load(latest_checkpoint, fork)
        self._loaded = latest_checkpoint if self._state.batches_trained else None
        self._marks = self._engine_marks()

    def begin_with(self, length: Any) -> Any:
        """As :meth:`begin`; ``length`` is how long to train, where the options do not say it."""
        if (
            self._loaded is not None
        ):  # what the script has done since is undone: its checkpoint comes after that
            if self._marks != self._engine_marks():
                self._read(self._loaded)
            else:
                self._script.restore()
        if self._options.lengths["max_length"] is None:
            lengths = {**self._options.lengths, "max_length": length}
            self._options = replace(self._options, lengths=lengths)
        batches = self.begin()
        if self.length is None and self._schedule.batches_per_epoch is None:
            message = "the training data has no length, so nothing says when a pass over it ends"
            fix = "state fit.max_length: {batches: 1000}, or give the dataset a __len__"
            raise ConfigError(Problem(key="s.loader", message=message, fix=fix, code="epochs-without-length"))
        return batches

    def _engine_marks(self) -> Any:
        """What differs once anything has changed weights, optimizer settings or a schedule of an engine."""
        records = [
            {key: each[key] for key in ("groups", "scheduler")} for each in records_of(self._context.models)
        ]
        versions = [
            [getattr(each, "ds_tensor", each)._version for each in engine.module.parameters()]
            for engine in self._context.models
        ]
        return records, versions

    def _make_validator(self) -> ReportedValidation:
        return ReportedValidation(self._context.device, set() if self._is_chief else None)

    def _set_modes(self) -> None:
        self._script.restore_modes()

    def _catch_up(self) -> None:
        """Report what the script has validated before the first batch."""
        if any(self._context.distributed.allgather(self._validator.is_pending)):
            self._validate()

    @property
    def _source(self) -> str:
        return "s.report"

    @property
    def position(self) -> dict[str, int]:
        """What the loaded checkpoint says of the script; empty without one."""
        return {name: value for name, value in self._script.found.items() if isinstance(value, int)}

    # ------------------------------------------------------------------------------------ a step

    def begin_step(self) -> None:
        super().begin_step()
        self._steps = self._steps or [engine.global_steps for engine in self._context.models]
        self._before = self._counters()

    @property
    def is_untouched(self) -> bool:
        """Whether no engine has done anything since the step has begun: its batch was taken, and not used."""
        return self._before == self._counters()

    def _counters(self) -> list[tuple[int, int]]:
        return [(engine.global_steps, engine.micro_steps) for engine in self._context.models]

    def report_validation(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Keep what the script reports of a validation until the step ends."""
        self._validator.add(metrics, weight)

    def pause(self) -> None:
        """What follows is not training."""
        self._reporter.pause()
        if self._capture is not None and self.has_stepped:
            self._capture.stop()

    @property
    def has_stepped(self) -> bool:
        """Whether an engine has made the optimizer step of the step at hand."""
        pairs = zip(self._counters(), self._before, strict=False)
        return any(steps > before for (steps, _), (before, _) in pairs)

    def finish_step(self, *, agreed: bool, ends: bool) -> None:
        """The script is done with a step; a collective where anything is due.

        Args:
            agreed: All ranks know that a validation may have been reported after this step.
            ends: It is the last one of the training.
        """
        self._check_engines()
        self._count_step()
        self._agreed, self._ends = agreed, ends
        self.end_step()

    def _due(self) -> Due:
        due = super()._due()
        ends = due.end or self._ends
        agreed = self._agreed or due.validate or ends
        validate = self._is_validated(agreed)
        wanted_at, self.wanted_at = self.wanted_at, ""
        checkpoint = due.checkpoint or ends or self._is_wanted(wanted_at, agreed)
        return Due(report=due.report or ends, validate=validate, checkpoint=checkpoint, end=ends)

    def _is_wanted(self, place: str, agreed: bool) -> bool:
        """Whether the script wants a checkpoint; a collective as the next one.

        Raises:
            TrainingError: only some ranks do, which would wait for the others.
        """
        batch = self._state.batches_trained
        if agreed:
            places = self._context.distributed.allgather(place)
            place, everywhere = next(filter(None, places), ""), all(places)
        else:
            everywhere = not place or all_ranks_come(f"checkpoint/{batch}", within_s=COME_WITHIN_S)
        if place and not everywhere:
            raise TrainingError(
                f"{place}: s.checkpoint() was called on some ranks only, after batch {batch}\n  fix: call it on every "
                "rank, outside of `if s.rank == 0:`; each saves its part"
            )
        return bool(place)

    @property
    def _share_trained(self) -> float:
        """Where only the script knows its end, that is known once it is there."""
        return 1.0 if self._ends else super()._share_trained

    def _is_validated(self, agreed: bool) -> bool:
        """Whether a rank has reported a validation; a collective where all ranks know that one may have."""
        pending, batch = self._validator.is_pending, self._state.batches_trained
        if agreed:
            return any(self._context.distributed.allgather(pending))
        if pending and not all_ranks_come(f"validation/{batch}", within_s=COME_WITHIN_S):
            raise TrainingError(
                f"s.report(..., validation=True) was called on some ranks only, after batch {batch}, in the middle of "
                "a pass\n  fix: call it on every rank, or after the loop over the loader"
            )
        return pending

    def _check_engines(self) -> None:
        """Refuse a step that is not one: the position in the data and the weights would no longer belong together."""
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

    # ------------------------------------------------------------------------------------ end

    def end_without(self, taken: int, accumulation: int) -> None:
        """End where the script has left a step that it had begun: report and save the last whole one; a collective.

        Args:
            taken: Micro-batches of the step that were taken.
            accumulation: Micro-batches in it.
        """
        if not self.is_untouched:
            self._progress.note(
                f"left out    {taken} of {accumulation} micro-batches of batch {self._state.batches_trained + 1}: the "
                "script has ended in the middle of it"
            )
        self._agreed, self._ends = True, True
        due = replace(self._due(), report=self._reporter.take_back_batch() > 0)
        if self._data_place.of is not None:  # a stream's position is after what was taken
            due = replace(due, checkpoint=False)
        self._do(due)

    def _prove_checkpoint(self) -> None:
        def load() -> None:
            self._read(self._last_uuid)

        same = prove_checkpoint(self._context, self._sums_of_weights, load)
        self._progress.note(f"test passed: trained, saved, loaded back, weights that add up to {same}")

    def _sums_of_weights(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for index, engine in enumerate(self._context.models):
            for name, parameter in engine.module.named_parameters():
                own = getattr(parameter, "ds_tensor", parameter).detach()
                found[f"{index}/{name}"] = float(own.double().sum())
        return found
