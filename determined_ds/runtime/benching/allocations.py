"""Bytes that this process has allocated for tensors: by CUDA's allocator, or on a CPU by the C library.

glibc counts the blocks that it maps by themselves. Below a threshold it does not, so the threshold is set low while
bytes are counted, and what is free in its heap is taken first.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch

M_MMAP_THRESHOLD = -3
BLOCK_BYTES = 16 * 2**10  # from here on, a block is mapped by itself, and counted to the page
OWN_THRESHOLD = 32 * 2**20  # where glibc's own moving threshold ends


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(f"before_{index}", ctypes.c_size_t) for index in range(4)] + [
        ("hblkhd", ctypes.c_size_t),
        *((f"after_{index}", ctypes.c_size_t) for index in range(5)),
    ]


class Allocations:
    """Counts while it is entered.

    Args:
        device: Whose memory.

    Attributes:
        can_count: Whether it can: on a CPU, where the C library is glibc.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._libc: Any = None
        self.can_count = device.type == "cuda"
        if not self.can_count:
            with contextlib.suppress(OSError, AttributeError):
                self._libc = ctypes.CDLL("libc.so.6")
                self._libc.mallinfo2.restype = _Mallinfo2
                self._libc.malloc.restype = ctypes.c_void_p
                self.can_count = True

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Within it, what is allocated can be counted."""
        if self._libc is None:
            yield
            return
        self._libc.mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES)
        held = self._take_free_room()
        try:
            yield
        finally:
            self._libc.mallopt(M_MMAP_THRESHOLD, OWN_THRESHOLD)
            for block in held:
                self._libc.free(ctypes.c_void_p(block))

    def now(self) -> int:
        """Bytes that are allocated; on a CPU in blocks of :data:`BLOCK_BYTES` or more."""
        if self._libc is None:
            return int(torch.cuda.memory_allocated(self._device)) if self.can_count else 0
        return int(self._libc.mallinfo2().hblkhd)

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Within it, the most that is allocated is found: the only number of the list, once it has ended.

        CUDA's allocator keeps it. On a CPU a thread looks every millisecond: buffers that live shorter are missed.
        """
        found = [self.now()]
        if self._libc is None:
            if self.can_count:
                torch.cuda.reset_peak_memory_stats(self._device)
            yield found
            if self.can_count:
                found[0] = int(torch.cuda.max_memory_allocated(self._device))
            return
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.001):
                found[0] = max(found[0], self.now())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()

    def _take_free_room(self) -> list[int]:
        """Allocate what is free in the heap, so that large blocks come from the system."""
        held, before = [], self.now()
        while self.now() == before:
            held.append(self._libc.malloc(ctypes.c_size_t(BLOCK_BYTES)))
        return held
