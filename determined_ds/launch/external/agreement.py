"""How the ranks of another launcher agree on a run before it starts: rank 0 decides, the others answer.

JSON values in the store at ``MASTER_ADDR:MASTER_PORT``, through which torch's process group is made afterwards.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from determined_ds.errors import TrainingError
from determined_ds.launch.external.placement import Placement

# Ranks may start this much later than others: images are loaded, rank 0 reads a large checkpoint.
PATIENCE = timedelta(minutes=30)


class Agreement:
    """Between all ranks of a run; a single rank needs no store.

    Args:
        placed: The place of this process.
        patience: How long the others may take to join, and to answer.

    Raises:
        TrainingError: the others cannot be reached.
    """

    def __init__(self, placed: Placement, *, patience: timedelta = PATIENCE) -> None:
        self._placed = placed
        self._patience = patience
        self._store: Any = None
        if placed.size == 1:
            return
        import torch.distributed as dist

        try:
            store, _, _ = next(
                dist.rendezvous("env://", placed.rank, placed.size, timeout=patience)  # type: ignore[no-untyped-call]
            )
        except (RuntimeError, ValueError) as error:
            where = f"{placed.master_addr}:{placed.master_port}"
            raise TrainingError(f"the ranks cannot meet at {where}: {error}") from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"det-ds/{attempt}", store)

    def plan(self, plan: Any = None) -> Any:
        """Rank 0's plan, on all ranks; only rank 0 passes one."""
        return self._from_chief("plan", plan)

    def answers(self, answer: Any) -> list[Any]:
        """Every rank's answer, by rank, on rank 0; the others get none."""
        if self._placed.size == 1:
            return [answer]
        self._store.set(f"answer/{self._placed.rank}", json.dumps(answer))
        if self._placed.rank:
            return []
        return [json.loads(self._store.get(f"answer/{rank}")) for rank in range(self._placed.size)]

    def verdict(self, verdict: Any = None) -> Any:
        """Rank 0's decision on the answers, on all ranks. Rank 0 leaves last, since the store may be its own."""
        found = self._from_chief("verdict", verdict)
        if self._placed.size > 1:
            left = self._store.add("left", 1)
            if self._placed.rank == 0 and left < self._placed.size:
                self._store.wait(["all left"], self._patience)
            elif left == self._placed.size:
                self._store.set("all left", "")
        return found

    def _from_chief(self, name: str, value: Any) -> Any:
        if self._placed.size == 1:
            return value
        if self._placed.rank == 0:
            self._store.set(name, json.dumps(value))
            return value
        return json.loads(self._store.get(name))
