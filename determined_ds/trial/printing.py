"""What a DeepSpeed JSON asks an engine to print, printed: DeepSpeed 0.19.8 logs it at a level that it does not show.

``wall_clock_breakdown``, ``memory_breakdown`` and ``flops_profiler`` print by themselves.

Source: ``_report_progress`` and ``__init__`` in ``runtime/engine.py``, ``ThroughputTimer`` in ``utils/timer.py``,
``CommsLogger.append`` in ``utils/comms_logging.py``; the logger's level is WARNING in ``utils/logging.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import comms_logging
from deepspeed.utils.logging import print_dist


def print_what_is_asked(engine: Any) -> None:
    """Have rank 0 print what the engine's configuration asks for; again, on the same engine, changes nothing.

    Args:
        engine: DeepSpeed's.
    """
    if getattr(engine, "_prints_what_is_asked", False):
        return
    engine._prints_what_is_asked = True
    if isinstance(engine, PipelineEngine) and engine.wall_clock_breakdown() and not engine.steps_per_print():
        engine._config.steps_per_print = 1  # it divides by that at each step: without one, training fails
    if engine.steps_per_print():
        engine._report_progress = functools.partial(_report_progress, engine)
        engine.tput_timer.logging = _print
    if engine.dump_state():
        lines = [f"  {name} {'.' * (29 - len(name))} {value}" for name, value in sorted(vars(engine).items())]
        _print("\n".join(["DeepSpeedEngine:", *lines]))
    if comms_logging.__dict__.get("log_dist") is not print_dist and dist.comms_logger.verbose:
        comms_logging.log_dist = print_dist


def _report_progress(engine: Any, step: int) -> None:
    _print(f"step={step}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, mom={engine.get_mom()}")


def _print(message: str) -> None:
    print_dist(message, ranks=[0])


def print_communication() -> None:
    """The table of ``comms_logger`` at the end of training, where it is enabled; a collective then."""
    if dist.comms_logger.enabled:
        dist.log_summary()
