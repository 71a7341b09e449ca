"""Where an engine's parameters, gradients, optimizer states and communication buffers lie, for the memory in a trace.

A trace knows allocations by their addresses alone. What has them is looked at when recording begins, and in a step at
the moments when gradients exist; each look is a range of the trace, which says when it was.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.autograd.profiler import record_function

from determined_ds.protocol.profile_files import HELD_LOOK
from determined_ds.runtime.checkpoints.state_bytes import storages, watch


class MemoryLooks:
    """Looks at what engines hold, while they are profiled.

    Args:
        engines: DeepSpeed's, or others with a ``module`` and an ``optimizer``; others are left out.
    """

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = [each for each in engines if getattr(each, "optimizer", None) is not None]
        self._looks: list[dict[str, list[tuple[int, int]]]] = []
        self._let_go: list[Callable[[], None]] = []

    def look(self, *_: Any) -> None:
        """Note what is held now."""
        with record_function(f"{HELD_LOOK}{len(self._looks)}"):
            found: dict[str, list[tuple[int, int]]] = {}
            for engine in self._engines:
                for kind, address, num_bytes in itertools.chain(storages(engine), _buffers(engine)):
                    found.setdefault(kind, []).append((address, num_bytes))
            self._looks.append(found)

    def watch(self) -> None:
        """Look whenever gradients exist, until :meth:`stop`."""
        for engine in self._engines:
            self._let_go.append(watch(engine, self.look))

    def stop(self) -> None:
        """End what :meth:`watch` began."""
        while self._let_go:
            self._let_go.pop()()

    def as_json(self) -> str:
        """All looks, for the trace's metadata."""
        return json.dumps(self._looks)


def _buffers(engine: Any) -> Iterator[tuple[str, int, int]]:
    """The buckets in which ZeRO reduces gradients.

    Source: ``IPGBucket`` in deepspeed 0.19.8's ``runtime/zero/stage_1_and_2.py``, ``IPGBucketZ3`` in ``stage3.py``.
    """
    for bucket in (getattr(engine.optimizer, "ipg_buckets", None) or {}).values():
        found = bucket.buffer
        for tensor in found if isinstance(found, list) else (found,):
            if tensor is not None:
                storage = tensor.untyped_storage()
                yield "communication", storage.data_ptr(), storage.nbytes()
