"""DeepSpeed's timers of an engine, corrected.

``wall_clock_breakdown`` of deepspeed 0.19.8 starts and stops timers around the parts of a step, prints them, and starts
anew. Corrected is that

- a pipeline of two stages or more fails in its first backward pass: the timer is started by the pipeline, and again by
  the engine's hook on the tensors that it goes back through;
- a pipeline keeps a record of every batch where ``steps_per_print`` is absent.

Source: ``SynchronizedWallClockTimer`` in ``utils/timer.py``; ``PipelineEngine._exec_backward_pass`` and ``train_batch``
in ``runtime/pipe/engine.py``; ``DeepSpeedEngine._backward_prologue`` in ``runtime/engine.py``.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer


class _StepTimer(SynchronizedWallClockTimer.Timer):  # type: ignore[misc]
    """A timer that may be started while it runs, and stopped while it does not."""

    def start(self) -> None:
        if not self.started_:
            super().start()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if self.started_:
            super().stop(reset, record)


class _StepTimers(SynchronizedWallClockTimer):  # type: ignore[misc]
    Timer = _StepTimer


def correct_timers(engine: Any) -> None:
    """Give a ``DeepSpeedEngine`` timers that work with every schedule; does nothing the second time."""
    if isinstance(engine.timers, _StepTimers):
        return
    engine.timers = _StepTimers()
    if not isinstance(engine, PipelineEngine):
        return
    if engine.wall_clock_breakdown() and not engine.steps_per_print():
        engine._config.steps_per_print = 1  # it divides by that at each step: without one, training fails
    if not engine.steps_per_print():
        engine.timers.timers[TRAIN_BATCH_TIMER] = NoopTimer.Timer()  # nothing reads it
