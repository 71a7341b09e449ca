"""DeepSpeed's timers and its logger of communication, corrected: in deepspeed 0.19.8

- a pipeline of two stages or more fails in its first backward pass under ``wall_clock_breakdown``: the timer is started
  by the pipeline, and again by the engine's hook on the tensors that it goes back through;
- a pipeline keeps a record of every batch where ``steps_per_print`` is absent;
- the time of a call in ``comms_logger`` is that of all calls of its name since the start;
- an operation that it knows no bandwidth of, such as ``all_gather_object``, ends the process, with exit code 0.

Source: ``SynchronizedWallClockTimer`` in ``utils/timer.py``; ``PipelineEngine`` in ``runtime/pipe/engine.py``;
``timed_op`` in ``comm/comm.py``; ``utils/comms_logging.py``.
"""

from __future__ import annotations

from typing import Any

from deepspeed.comm import comm
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer


class _Timers(SynchronizedWallClockTimer):  # type: ignore[misc]
    """Timers that may be started while they run, and stopped while they do not."""

    class Timer(SynchronizedWallClockTimer.Timer):  # type: ignore[misc]
        def start(self) -> None:
            if not self.started_:
                super().start()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            if self.started_:
                super().stop(reset, record)


class _CallTimers(SynchronizedWallClockTimer):  # type: ignore[misc]
    """Timers of one call at a time."""

    class Timer(_Timers.Timer):
        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds of the last call, whatever ``reset`` says."""
            return float(super().elapsed(reset=True))


def correct_timers(engine: Any) -> None:
    """Correct the timers of an engine, and the logger of communication."""
    engine.timers = _Timers()
    if isinstance(engine, PipelineEngine) and not engine.steps_per_print():
        if engine.wall_clock_breakdown():
            engine._config.steps_per_print = 1  # it divides by that at each step: without one, training fails
        else:
            engine.timers.timers[TRAIN_BATCH_TIMER] = NoopTimer.Timer()  # nothing reads it
    correct_comms_logger()


def correct_comms_logger() -> None:
    """Have DeepSpeed's logger of communication log what a call has taken; does nothing the second time."""
    if isinstance(comm.timers, _CallTimers):
        return
    comm.timers = _CallTimers()
    append = comm.comms_logger.append

    def append_call(raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        if raw_name not in ("all_gather_object", "monitored_barrier"):  # whose bandwidth it does not know
            append(raw_name, record_name, max(latency, 1e-6), msg_size)  # it divides by the time

    comm.comms_logger.append = append_call


def print_communication() -> None:
    """The table of ``comms_logger`` at the end of training, where it is enabled; a collective then."""
    if comm.comms_logger.enabled and getattr(comm.comms_logger, "prints", True):
        comm.log_summary()
