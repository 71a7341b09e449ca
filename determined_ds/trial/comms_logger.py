"""DeepSpeed's logger of communication, corrected.

Corrected of ``comms_logger`` in deepspeed 0.19.8 is that

- the time of a call is that of all calls of its name since the start, and each takes longer to add up;
- an operation that it knows no bandwidth of, such as ``all_gather_object``, ends the process, with exit code 0.

Not corrected: on a CPU it sees only the start of an operation that runs in the background.

Source: ``timed_op`` in ``comm/comm.py``; ``CommsLogger`` and ``calc_bw_log`` in ``utils/comms_logging.py``.
"""

from __future__ import annotations

from deepspeed.comm import comm
from deepspeed.utils.timer import SynchronizedWallClockTimer

# Operations that DeepSpeed logs, and has no bandwidth of.
WITHOUT_BANDWIDTH = frozenset({"all_gather_object", "monitored_barrier"})
SHORTEST_MS = 1e-6  # a bandwidth is divided by it


class _CallTimer(SynchronizedWallClockTimer.Timer):  # type: ignore[misc]
    """A timer of one call at a time."""

    def start(self) -> None:
        if not self.started_:
            super().start()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if self.started_:
            super().stop(reset, record)

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds of the last call, whatever ``reset`` says."""
        return float(super().elapsed(reset=True))


class _CallTimers(SynchronizedWallClockTimer):  # type: ignore[misc]
    Timer = _CallTimer


def correct_comms_logger() -> None:
    """Have DeepSpeed's logger of communication log what a call has taken; does nothing the second time."""
    if isinstance(comm.timers, _CallTimers):
        return
    comm.timers = _CallTimers()
    append = comm.comms_logger.append

    def append_call(raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        if raw_name not in WITHOUT_BANDWIDTH:
            append(raw_name, record_name, max(latency, SHORTEST_MS), msg_size)

    comm.comms_logger.append = append_call
