"""DeepSpeed's logger of communication, corrected, and read by this library.

Corrected of ``comms_logger`` in deepspeed 0.19.8 is that

- the time of a call is that of all calls of its name since the start, and each takes longer to add up;
- an operation that it knows no bandwidth of, such as ``all_gather_object``, ends the process, with exit code 0.

Not corrected: on a CPU it sees only the start of an operation that runs in the background. So the time here is that in
which the caller waits: until a call returns, and until what it has started is done. On a GPU DeepSpeed waits after
each call, so both are the same there; no communication overlaps with computation meanwhile.

Source: ``timed_op`` in ``comm/comm.py``; ``CommsLogger`` and ``calc_bw_log`` in ``utils/comms_logging.py``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.comm import comm
from deepspeed.utils.timer import SynchronizedWallClockTimer

# Methods of DeepSpeed's backend that send or receive tensors.
OPERATIONS = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "gather", "scatter", "broadcast"),
    *("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "all_to_all", "all_to_all_single"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
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


class CommunicationMeter:
    """Seconds that this rank spends in DeepSpeed's communication, and the bytes that it is of.

    Bytes are of the whole: the input of an all-reduce or a reduce-scatter, the output of an all-gather.

    Args:
        device: Of the engines.
        prints: Whether DeepSpeed is to print its table at the end, as a user's own ``comms_logger`` says.
    """

    def __init__(self, device: torch.device, *, prints: bool) -> None:
        self._by_deepspeed = device.type == "cuda"
        self._prints = prints
        self._seconds = self._bytes = 0.0
        self._is_inside = False
        self._undo = contextlib.ExitStack()

    def attach(self) -> None:
        """Measure from now on, until :meth:`detach`."""
        backend, log = comm.cdb, comm.comms_logger
        for name in OPERATIONS:
            if hasattr(type(backend), name):
                setattr(backend, name, self._metered(getattr(backend, name)))
                self._undo.callback(vars(backend).pop, name, None)
        append, was_enabled = log.append, log.enabled
        self._undo.callback(setattr, log, "append", append)
        self._undo.callback(setattr, log, "enabled", was_enabled)
        log.append = functools.partial(self._append, append if self._prints else _nothing)
        log.enabled = self._prints or self._by_deepspeed
        log.prints = self._prints

    def detach(self) -> None:
        """End it."""
        self._undo.close()

    def take(self) -> tuple[float, float]:
        """Seconds and bytes since the last call."""
        taken = self._seconds, self._bytes
        self._seconds = self._bytes = 0.0
        return taken

    def _append(
        self, append: Callable[..., None], raw_name: str, record_name: str, latency: float, size: int
    ) -> None:
        append(raw_name, record_name, latency, size)
        if self._by_deepspeed:
            self._seconds += latency / 1000

    def _metered(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def metered(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # one operation that is done by another
                return operation(*args, **kwargs)
            self._bytes += max(map(_num_bytes, (*args, *kwargs.values())), default=0)
            if self._by_deepspeed:
                return operation(*args, **kwargs)
            with self._waiting():
                result = operation(*args, **kwargs)
            if isinstance(result, list):
                return [_Awaited(each, self._waiting) for each in result]
            return _Awaited(result, self._waiting) if hasattr(result, "wait") else result

        return metered

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        before, self._is_inside, start = self._is_inside, True, time.perf_counter()
        try:
            yield
        finally:
            self._is_inside = before
            if not before:
                self._seconds += time.perf_counter() - start


class _Awaited:
    """An operation under way; waiting for it is timed."""

    def __init__(self, work: Any, waiting: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._work = work
        self._waiting = waiting

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._waiting():
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _num_bytes(argument: Any) -> int:
    """Of a tensor, or of all tensors in a list; 0 of anything else."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(_num_bytes(getattr(each, "tensor", each)) for each in argument)
    return 0


def _nothing(*_: Any) -> None:
    pass
