"""How the ranks of another launcher meet and agree before a run starts: rank 0 decides, the others answer.

They exchange JSON values through a store of torch's at ``MASTER_ADDR:MASTER_PORT``, where its process group meets
afterwards. torchrun's store outlives the ranks, and so do the keys of an attempt that failed; its
``TORCHELASTIC_RESTART_COUNT`` grows only on the machine whose rank failed. So rank 0 counts the attempts in the store
and hands the number to the ranks that it finds there, under a token that only a process that lives knows.

Source: ``_invoke_run`` in torch 2.13's ``elastic/agent/server/api.py``; ``dynamic_rendezvous.py`` keeps the store.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

from determined_ds.errors import TrainingError
from determined_ds.launch.placement import Placement
from determined_ds.rundir.handed_on import in_words, stated_s

# Minutes that ranks may start later than others: images are loaded, torch is read from a busy disk.
JOIN_TIMEOUT, JOIN_TIMEOUT_MINUTES = "DETERMINED_DS_JOIN_TIMEOUT", 10.0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Once all are there, rank 0 may read a large checkpoint.
PATIENCE = timedelta(hours=2)
POLL_S = 0.1
LATER = f"where ranks take longer to start: export {JOIN_TIMEOUT}=MINUTES"


class Meeting:
    """The ranks of one attempt, once all have come; a single rank needs no store.

    Args:
        placed: The place of this process.

    Attributes:
        again: Whether the launcher has given the same command before, on any machine.
        hosts: Of each rank, on rank 0.

    Raises:
        ConfigError: the time that ranks may take to come is not a number.
        TrainingError: not all have come in time; those that are missing are named with their machine.
    """

    def __init__(self, placed: Placement) -> None:
        self._placed = placed
        restarts, host = int(os.environ.get(RESTART_COUNT, "0")), socket.gethostname()
        own: dict[str, Any] = {"host": host, "restarts": restarts, "token": uuid.uuid4().hex}
        self.again, self._ranks = restarts > 0, {placed.rank: own}
        limit_s = stated_s(JOIN_TIMEOUT, JOIN_TIMEOUT_MINUTES)
        if placed.size == 1:
            return
        import torch.distributed as dist

        where = f"{placed.master_addr}:{placed.master_port}"
        serves = placed.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = dist.TCPStore(
                placed.master_addr,
                placed.master_port,
                is_master=serves,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,  # torch would not say who is missing
                multi_tenant=True,
            )
            self._all = dist.PrefixStore("det-ds", store)
            attempt = self._gather(limit_s) if placed.rank == 0 else self._join(own)
            store.set_timeout(PATIENCE)
            self._store = dist.PrefixStore(f"det-ds/{attempt}", store)
            self.again = self.share("again", attempt > 1 or any(r["restarts"] for r in self._ranks.values()))
        except RuntimeError as error:  # torch's
            reason = str(error).splitlines()[0].partition(". Exception raised")[0]
            words = f"cannot reach rank 0 (machine 0, {where}): {reason}"
            fix = f"look at the launcher's output of machine 0, and whether {where} can be reached from here; {LATER}"
            if serves:
                words = f"cannot listen at {where}: {reason}"
                fix = "set MASTER_ADDR to an address of this machine, and MASTER_PORT to a free port"
            raise TrainingError(f"rank {placed.rank} on {host} {words}\n  fix: {fix}") from None
        if RESTART_COUNT in os.environ:  # the process group of each attempt has keys of its own by it
            os.environ[RESTART_COUNT] = str(attempt - 1)

    @property
    def hosts(self) -> list[str]:
        return [self._ranks[rank]["host"] for rank in sorted(self._ranks)]

    def _gather(self, limit_s: float) -> int:
        """Rank 0: wait for the others. Returns the number of the attempt, from 1."""
        attempt, began_s = int(self._all.add("attempts", 1)), time.monotonic()
        missing = set(range(1, self._placed.size))
        while missing:
            for rank in sorted(missing):
                if self._all.check([f"{attempt}/here/{rank}"]):
                    missing.discard(rank)
                elif self._all.check([f"rank/{rank}"]):
                    said = json.loads(self._all.get(f"rank/{rank}"))
                    if said != self._ranks.get(rank):  # one of an earlier attempt does not answer
                        self._ranks[rank] = said
                        self._all.set(said["token"], str(attempt))
            if missing and time.monotonic() - began_s > limit_s:
                here = sorted({said["host"] for rank, said in self._ranks.items() if rank not in missing})
                named = "; ".join(
                    f"machine {r // self._placed.local_size}: rank {r}" for r in sorted(missing)
                )
                raise TrainingError(
                    f"{named} has not come within {in_words(limit_s)}; here: {', '.join(here)}\n"
                    "  fix: look at the launcher's output of that machine, and whether it reaches "
                    f"{self._placed.master_addr}:{self._placed.master_port}; {LATER}"
                )
            time.sleep(POLL_S if missing else 0.0)
        return attempt

    def _join(self, own: dict[str, Any]) -> int:
        """Any other rank: wait for rank 0. Returns the number of the attempt."""
        self._all.set(f"rank/{self._placed.rank}", json.dumps(own))
        attempt = int(self._all.get(own["token"]))
        self._all.set(f"{attempt}/here/{self._placed.rank}", "")
        return attempt

    # --------------------------------------------------------------------------- once all have come

    def share(self, name: str, value: Any = None) -> Any:
        """A value of rank 0, on all ranks; only rank 0 passes one."""
        if self._placed.size == 1:
            return value
        if self._placed.rank == 0:
            self._store.set(name, json.dumps(value))
            return value
        return json.loads(self._store.get(name))

    def answers(self, answer: Any) -> list[Any]:
        """Every rank's answer, by rank, on rank 0; the others get none.

        Raises:
            TrainingError: a rank has not answered, or was started again meanwhile, and waits for another attempt.
        """
        if self._placed.size == 1:
            return [answer]
        self._store.set(f"answer/{self._placed.rank}", json.dumps(answer))
        if self._placed.rank:
            return []
        until_s = time.monotonic() + PATIENCE.total_seconds()
        for rank, said in sorted(self._ranks.items()):
            while not self._store.check([f"answer/{rank}"]):
                is_same = rank == 0 or json.loads(self._all.get(f"rank/{rank}"))["token"] == said["token"]
                if not is_same or time.monotonic() > until_s:
                    how = "has not answered" if is_same else "was started again before the run began"
                    message = f"rank {rank} on {said['host']} {how}; see its launcher's output there"
                    raise TrainingError(message)
                time.sleep(POLL_S)
        return [json.loads(self._store.get(f"answer/{rank}")) for rank in range(self._placed.size)]

    def leave(self) -> None:
        """Nothing more is exchanged. Rank 0 leaves last, since the store may be its own."""
        if self._placed.size > 1:
            left = self._store.add("left", 1)
            if left == self._placed.size:
                self._store.set("all left", "")
            elif self._placed.rank == 0:
                self._store.wait(["all left"], PATIENCE)
