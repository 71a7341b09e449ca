"""DeepSpeed's timers of an engine, corrected, and read by this library.

``wall_clock_breakdown`` of deepspeed 0.19.8 starts and stops timers around the parts of a step, prints them, and starts
anew. Corrected is that

- a pipeline of two stages or more fails in its first backward pass: the timer is started by the pipeline, and again by
  the engine's hook on the tensors that it goes back through;
- a pipeline keeps a record of every batch where ``steps_per_print`` is absent.

Source: ``SynchronizedWallClockTimer`` in ``utils/timer.py``; ``PipelineEngine._exec_backward_pass`` and ``train_batch``
in ``runtime/pipe/engine.py``; ``DeepSpeedEngine._backward_prologue`` in ``runtime/engine.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import EngineTimers
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.utils.timer import (
    BACKWARD_GLOBAL_TIMER,
    FORWARD_GLOBAL_TIMER,
    STEP_GLOBAL_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
)

# Part of a step -> DeepSpeed's timer of it.
TIMERS = {"forward": FORWARD_GLOBAL_TIMER, "backward": BACKWARD_GLOBAL_TIMER, "optimizer": STEP_GLOBAL_TIMER}
NEVER = 2**62  # steps between two prints


class StepTimer(SynchronizedWallClockTimer.Timer):  # type: ignore[misc]
    """A timer that may be started while it runs, and adds up what is read of it.

    Attributes:
        at_stop: Called where it is stopped; None: nothing is, and what it has seen is not kept.
        is_due: Whether what begins is to be timed; None: it is.
    """

    at_stop: Callable[[], None] | None = None
    is_due: Callable[[], bool] | None = None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._read_ms = 0.0

    def start(self) -> None:
        if not self.started_ and (self.is_due is None or self.is_due()):
            super().start()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if self.started_:
            super().stop(reset, record)
            if self.at_stop is not None:
                self.at_stop()

    def reset(self) -> None:
        """Start anew, as DeepSpeed does when it has printed; what was timed is kept for :meth:`take_s`."""
        if self.at_stop is not None:
            self._read_ms += self._get_elapsed_msec()
        super().reset()

    def take_s(self) -> float:
        """Seconds since the last call; waits for the GPU."""
        self.reset()
        taken, self._read_ms = self._read_ms / 1000, 0.0
        return taken


class StepTimers(SynchronizedWallClockTimer):  # type: ignore[misc]
    """The timers of an engine.

    Attributes:
        is_silent: Whether they are read by this library alone, and not printed.
        is_printed_each_step: Whether a pipeline prints each step since nothing says how often.
    """

    Timer = StepTimer
    is_silent = False
    is_printed_each_step = False

    def log(self, names: list[str], *args: Any, **kwargs: Any) -> None:
        if not self.is_silent:
            super().log(names, *args, **kwargs)

    def forget(self) -> None:
        """Start all of them anew."""
        for timer in self.timers.values():
            timer.reset()


def correct_timers(engine: Any) -> None:
    """Give a ``DeepSpeedEngine`` timers that work with every schedule; does nothing the second time."""
    if isinstance(engine.timers, StepTimers):
        return
    engine.timers = StepTimers()
    if not isinstance(engine, PipelineEngine):
        return
    if engine.wall_clock_breakdown() and not engine.steps_per_print():
        engine._config.steps_per_print = 1  # it divides by that at each step: without one, training fails
        engine.timers.is_printed_each_step = True
    if not engine.steps_per_print():
        engine.timers.timers[TRAIN_BATCH_TIMER] = NoopTimer.Timer()  # nothing reads it


def read_timers(engine: Any, at_stop: Callable[[str], None], *, prints: bool) -> dict[str, StepTimer]:
    """Have an engine time the parts of its steps.

    Args:
        engine: A ``DeepSpeedEngine`` whose timers are corrected.
        at_stop: Called at the end of each part, with its name in :data:`TIMERS`.
        prints: Whether DeepSpeed is to print them as well, as a user's own ``wall_clock_breakdown`` says.

    Returns:
        The timer of each part.
    """
    if not prints:
        _silence(engine)
    found: dict[str, StepTimer] = {part: engine.timers(name) for part, name in TIMERS.items()}
    for part, timer in found.items():
        timer.at_stop = functools.partial(at_stop, part)
        timer.is_due = lambda: bool(engine.module.training)  # and not in an evaluation
    return found


def stop_reading(engine: Any) -> None:
    """End :func:`read_timers`; what the JSON does not switch on is off again."""
    timers = engine.timers
    for name in TIMERS.values():
        timers(name).at_stop = timers(name).is_due = None
    timers.forget()
    if timers.is_silent:
        timers.is_silent = False
        engine._config.wall_clock_breakdown = False
        engine.engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=False)
    if engine.steps_per_print() == NEVER:
        engine._config.steps_per_print = None


def _silence(engine: Any) -> None:
    """Have the timers run, and nothing printed of them."""
    engine.timers.is_silent = True
    engine._config.wall_clock_breakdown = True
    # Those of single micro-batches are of no use but to be printed.
    engine.engine_timers = EngineTimers(enable_micro_timers=False, enable_global_timers=True)
    if isinstance(getattr(engine.optimizer, "timers", None), SynchronizedWallClockTimer):
        engine.optimizer.timers = NoopTimer()
    if isinstance(engine, PipelineEngine) and (
        engine.timers.is_printed_each_step or not engine.steps_per_print()
    ):
        engine._config.steps_per_print = NEVER
        engine.timers.timers[TRAIN_BATCH_TIMER] = NoopTimer.Timer()
