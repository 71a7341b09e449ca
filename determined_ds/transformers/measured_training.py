"""Steps of transformers' Trainer, measured under ``det-ds run --measure``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from determined import core

from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.run_dir import STEP_GROUP
from determined_ds.train.loop.step_measure import StepMeasure, keep_row, reported, too_short
from determined_ds.train.rank_memory import rank_memory
from determined_ds.train.scripts.given_run import Measurement, ScriptRun
from determined_ds.transformers.hf_arguments import ReconciledArguments
from determined_ds.trial.ddp import DDP

OURS = "from determined_ds.transformers import TrainingArguments"


class MeasuredTraining:
    """What :class:`DetCallback` does where steps are measured: nothing is evaluated, saved or reported but them.

    The arguments stay as they are, so that the schedule of the learning rate does; training is stopped, and the script
    ended, after the last step that is measured. A training of fewer steps is made longer where it is stated in steps.

    Args:
        run: Of the script.
        length: How many steps.
        core_context: Of the script.
        args: The arguments of the Trainer.

    Raises:
        ConfigError: they do not take the hyperparameters, so that a row would be named by another configuration.
    """

    def __init__(self, run: ScriptRun, length: Measurement, core_context: core.Context, args: Any) -> None:
        if not isinstance(args, ReconciledArguments) or args.resolved is None:
            message = f"the {type(args).__name__} of the Trainer do not take the hyperparameters"
            raise ConfigError(Problem(key="--measure", message=message, fix=f"write {OURS}", code="measure"))
        options: Any = args
        options.eval_on_start = False
        if 0 < options.max_steps < length.timed:
            options.max_steps = length.timed
        self._run = run
        self._length = length
        self._core = core_context
        self._resolved = args.resolved
        self._device: torch.device = options.device
        self._is_chief = core_context.distributed.rank == 0
        self._tokens: set[int | None] = set()  # of a sample, in the batches so far

    def begin(self, args: Any, state: Any, *, model: Any, optimizer: Any) -> None:
        """Training begins.

        Args:
            args: Of the Trainer.
            state: The same.
            model: The model, without its engine.
            optimizer: Accelerate's.

        Raises:
            ConfigError: it is too short.
        """
        if state.max_steps < self._length.timed:
            raise ConfigError(too_short(f"{state.max_steps} of {self._length.timed} steps"))
        self._engine = "deepspeed" if getattr(args, "hf_deepspeed_config", None) is not None else DDP
        zero_stage = self._resolved.zero_stage if self._engine == "deepspeed" else 0
        # Callbacks are given the parts of an engine, but not the engine.
        parts = SimpleNamespace(
            module=model, optimizer=optimizer.optimizer, zero_optimization_stage=lambda: zero_stage
        )
        self._measure = StepMeasure(
            [parts],
            device=self._device,
            distributed=self._core.distributed,
            length=self._length,
            note=self._note_step,
        )
        model.register_forward_pre_hook(self._look_at_batch, with_kwargs=True)
        self._measure.begin()

    def _look_at_batch(self, model: Any, _: Any, batch: dict[str, Any]) -> None:
        tokens = batch.get("input_ids")
        is_known = isinstance(tokens, torch.Tensor) and tokens.ndim == 2
        translates = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        self._tokens.add(int(tokens.shape[1]) if is_known and not translates else None)  # type: ignore[union-attr]

    def _note_step(self, step: int, seconds: float) -> None:
        if self._is_chief:
            self._core.train.report_metrics(STEP_GROUP, step, {"step_seconds": seconds})

    def stop_step(self) -> None:
        """The work of a step is done."""
        self._measure.stop()

    def allow(self, state: Any, control: Any) -> None:
        """Evaluate and save nothing, log each step, for its loss, and stop after the last one."""
        control.should_evaluate = control.should_save = False
        control.should_log = True
        if state.global_step >= self._length.timed:
            control.should_training_stop = True

    def end_step(self, loss: float) -> None:
        """The loss of the step is known: the mean over its samples on all ranks, which rank 0 counts alone."""
        counts = float(self._is_chief)
        self._measure.end(torch.tensor(loss * counts, dtype=torch.float64, device=self._device), counts)
        self._measure.begin()

    def end(self, *, was_stopped: bool) -> None:
        """Write what was measured, and end the script; a collective.

        Args:
            was_stopped: Whether a stop was requested.

        Raises:
            ConfigError: something else has ended the training too early.
            SystemExit: always, otherwise: what the script does after its training is not wanted.
        """
        gather = self._core.distributed.allgather
        seen = set().union(*gather(self._tokens))
        row = self._measure.row(
            self._resolved,
            engine=self._engine,
            peak_memory_bytes_by_rank=gather(rank_memory(self._device).peak_bytes),
            tokens_per_sample=next(iter(seen)) if len(seen) == 1 else None,
        )
        if self._is_chief and self._measure.has_timed:
            metrics = {"batches": self._measure.steps, **reported(row)}
            self._core.train.report_validation_metrics(self._measure.steps, metrics)
        keep_row(self._run, row, is_chief=self._is_chief, was_stopped=was_stopped)
        raise SystemExit(0)


def measured_training(
    run: ScriptRun | None, core_context: core.Context, args: Any
) -> MeasuredTraining | None:
    """What measures a Trainer's steps; None where they are not to be measured."""
    if run is None or run.measurement is None:
        return None
    return MeasuredTraining(run, run.measurement, core_context, args)
