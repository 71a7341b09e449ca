"""Whether to stop: asked at the end of each step, answered at the end of the next one, on every rank alike."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from determined import core

from determined_ds.train.group.distributed import TorchDistributedContext


class StopQuestion:
    """Asks the chief, who knows of a preemption, without waiting for it.

    A broadcast that is waited for takes about a millisecond, at every step. Where the ranks are joined by
    :func:`determined_ds.transformers.init`, the answer is on its way while the next step is computed, so a stop is
    honoured one step later. One rank knows at once; the ranks of another ``DistributedContext`` wait.

    Args:
        core_context: Of the script.
    """

    def __init__(self, core_context: Any) -> None:
        self._preempt = core_context.preempt
        self._distributed = core_context.distributed
        self._waits = type(self._distributed) is not TorchDistributedContext or self._distributed.size < 2
        self._answer: torch.Tensor | None = None
        self._work: Any = None

    def ask(self) -> bool:
        """Whether to stop after this step; a collective."""
        if self._waits:
            return self._ask_and_wait()
        stops = self._answered()
        self._answer = torch.tensor([self._chief_stops()], dtype=torch.uint8)
        self._work = self._distributed.begin_broadcast(self._answer)
        return stops

    def forget(self) -> None:
        """The training has ended, and its last question with it; a collective."""
        self._answered()

    def _answered(self) -> bool:
        work, answer, self._work, self._answer = self._work, self._answer, None, None
        if work is None or answer is None:
            return False
        work.wait()
        return bool(answer.item())

    def _ask_and_wait(self) -> bool:
        if self._preempt._preempt_mode is core.PreemptMode.WorkersAskChief:
            return bool(self._preempt.should_preempt())
        return bool(self._distributed.broadcast(self._chief_stops()))

    def _chief_stops(self) -> bool:
        """What the chief knows, which it alone is asked; False on any other rank."""
        if self._distributed.rank:
            return False
        with mock.patch.object(self._preempt, "_preempt_mode", core.PreemptMode.ChiefOnly):
            return bool(self._preempt.should_preempt())
