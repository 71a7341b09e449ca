"""What is measured of the steps of a training, whatever takes them: their seconds, losses and model states."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import GIB
from determined_ds.pipe.recording import RecordedStep
from determined_ds.report.results import MEASURED, STOPPED, Repetition, Row, write_row
from determined_ds.rundir.recorded_step import write_step
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.group.collectives import reduce_over_ranks
from determined_ds.train.scripts.given_run import Measurement, ScriptRun
from determined_ds.train.state_bytes import watch
from determined_ds.trial.ddp import DDP


class StepMeasure:
    """Measures steps one by one: :meth:`begin` before each, :meth:`end` after it.

    Args:
        engines: Those that train.
        device: Where they compute.
        distributed: The ranks.
        length: How many steps, and how many of them are the warm-up.
        note: Called with the number of each step, from 1, and its seconds on this rank.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        *,
        device: torch.device,
        distributed: Any,
        length: Measurement,
        note: Callable[[int, float], None],
    ) -> None:
        self.length = length
        self._engines = engines
        self._device = device
        self._distributed = distributed
        self._note = note
        self._start_seconds = 0.0
        self._started = 0.0
        self._taken: float | None = None  # of the step at hand, once its work is done
        self._seconds: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._weights: list[float] = []
        self._state_bytes = [0 for _ in engines]
        self._let_go: list[Callable[[], None]] = []

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return len(self._seconds)

    @property
    def is_done(self) -> bool:
        """Whether all steps that count have ended; what follows is not measured."""
        return self.steps >= self.length.timed

    @property
    def has_timed(self) -> bool:
        """Whether a step has ended that counts."""
        return self.steps > self.length.warmup

    def begin(self) -> None:
        """A step begins."""
        if self.is_done:
            return
        if self.steps == 0:
            self._start_seconds = time.time() - psutil.Process().create_time()
        # As late in the warm-up as can be, and not in the first step, which makes the optimizer's states.
        if self.steps == min(max(1, self.length.warmup - 1), self.length.timed - 1):
            self._watch_states()
        self._synchronize()
        self._started, self._taken = time.perf_counter(), None

    def stop(self) -> None:
        """The work of the step is done: what comes before :meth:`end` is not its time."""
        if self._taken is None and not self.is_done:
            self._synchronize()
            self._taken = time.perf_counter() - self._started

    def end(self, loss: torch.Tensor | None, weight: float) -> None:
        """The step has ended.

        Args:
            loss: The sum of this rank's losses in it; None where there is none.
            weight: How many are summed.
        """
        if self.is_done:
            return
        self.stop()
        assert self._taken is not None
        self._seconds.append(self._taken)
        while self._let_go:
            self._let_go.pop()()
        self._losses.append(torch.zeros((), device=self._device) if loss is None else loss.clone())
        self._weights.append(weight)
        self._note(self.steps, self._taken)

    def _watch_states(self) -> None:
        for index, engine in enumerate(self._engines):

            def note(found: dict[str, int], index: int = index) -> None:
                self._state_bytes[index] = max(self._state_bytes[index], sum(found.values()))

            self._let_go.append(watch(engine, note))

    def _synchronize(self) -> None:
        """Work that a GPU has yet to do belongs to the step that asked for it; in a profile it stays as it is."""
        if self._device.type == "cuda" and not self.length.profiles:
            torch.cuda.synchronize(self._device)

    def row(
        self,
        resolved: ResolvedConfig,
        *,
        engine: str,
        peak_memory_bytes_by_rank: Sequence[int],
        tokens_per_sample: int | None = None,
        bubble: float | None = None,
        bubble_ideal: float | None = None,
        pipeline_step: RecordedStep | None = None,
    ) -> Row:
        """What has been measured so far; a collective.

        Args:
            resolved: What was decided.
            engine: What trains: ``deepspeed`` or ``ddp``.
            peak_memory_bytes_by_rank: As of a :class:`Repetition`.
            tokens_per_sample: As of a :class:`Row`.
            bubble: As of a :class:`Repetition`.
            bubble_ideal: The same.
            pipeline_step: The same.

        Returns:
            One repetition; a step's time is that of the slowest rank.
        """
        seconds = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        reduce_over_ranks(seconds, dist.ReduceOp.MAX)
        losses = torch.stack([loss.double() for loss in self._losses])
        sums = torch.stack([losses, torch.tensor(self._weights, dtype=torch.float64, device=self._device)])
        reduce_over_ranks(sums)
        repetition = Repetition(
            run_dir="",
            step_seconds=tuple(seconds.tolist()[self.length.warmup :]),
            losses=tuple((sums[0] / sums[1]).tolist()) if sums[1].all() else (),
            warmup=self.length.warmup,
            start_seconds=self._start_seconds,
            peak_memory_bytes_by_rank=tuple(peak_memory_bytes_by_rank),
            model_state_bytes_by_rank=tuple(self._distributed.allgather(sum(self._state_bytes))),
            bubble=bubble,
            bubble_ideal=bubble_ideal,
            pipeline_step=pipeline_step,
        )
        done, total, strategy = self.steps, self.length.timed, resolved.strategy
        return Row(
            name=DDP if engine == DDP else strategy.name,
            engine=engine,
            slots=resolved.topology.slots,
            status=MEASURED if done == total else STOPPED,
            reason="" if done == total else f"stopped after {done} of {total} steps",
            zero_stage=resolved.zero_stage,
            micro_batch_size=resolved.batch.micro_batch_size,
            accumulation=resolved.batch.accumulation,
            replicas=resolved.batch.replicas,
            pipe_parallel_size=resolved.topology.pipe_parallel_size,
            precision=strategy.precision,
            samples_per_step=resolved.batch.global_batch_size,
            tokens_per_sample=tokens_per_sample,
            estimated_model_state_bytes=None,
            repetitions=(repetition,),
        )


def reported(row: Row) -> dict[str, Any]:
    """The numbers of a row, by the names that a search may go by."""
    metrics = {
        "samples_per_second": row.samples_per_second,
        "tokens_per_second": row.tokens_per_second,
        "step_seconds": row.median_step_seconds,
        "peak_memory_gib": None if row.peak_memory_bytes is None else row.peak_memory_bytes / GIB,
        "loss": row.loss,
    }
    return {name: value for name, value in metrics.items() if value is not None}


def keep_row(run: ScriptRun, row: Row, *, is_chief: bool, was_stopped: bool) -> None:
    """Write what was measured of a script.

    Args:
        run: Of the script.
        row: What was measured.
        is_chief: Whether this is rank 0, which writes it.
        was_stopped: Whether a stop was requested.

    Raises:
        ConfigError: the script has ended its training before the last step, without a stop.
    """
    assert run.measurement is not None
    if row.status == STOPPED and not was_stopped:
        raise ConfigError(too_short(row.reason.removeprefix("stopped after ")))
    run.is_measured = True
    if is_chief:
        write_measured(row, run.there)


def write_measured(row: Row, there: RunDir) -> None:
    """Write what was measured to a run directory, and the step of a pipeline that was recorded."""
    write_row(row, there.measured)
    for step in (each.pipeline_step for each in row.repetitions if each.pipeline_step is not None):
        write_step(step, there.pipeline_step)


def too_short(trained: str) -> Problem:
    """The problem of a script that trains fewer steps than are to be measured, e.g. ``20 of 35 steps``."""
    message = f"the script trains only {trained}"
    fix = "measure fewer steps (--steps, --warmup), or have the script train longer"
    return Problem(key="--measure", message=message, fix=fix, code="measure")
