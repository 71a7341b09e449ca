"""How the ranks of another launcher meet and agree before a run starts: rank 0 decides, the others answer.

They exchange JSON values through a store of torch's at ``MASTER_ADDR:MASTER_PORT``, where its process group meets
afterwards. torchrun's store outlives the ranks, and so do the keys of an attempt that failed; its
``TORCHELASTIC_RESTART_COUNT`` grows only on the machine whose rank failed. So rank 0 counts the attempts in the store
and hands the number to the ranks that it finds there, under a token that only a process that lives knows.

Source: ``_invoke_run`` in torch 2.13's ``elastic/agent/server/api.py``; ``dynamic_rendezvous.py`` keeps the store.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
import uuid
from datetime import timedelta
from typing import Any

from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.launch.placement import Placement
from determined_ds.rundir.handed_on import in_words

# Minutes that ranks may start later than others: images are loaded, torch is read from a busy disk.
JOIN_TIMEOUT, JOIN_TIMEOUT_MINUTES = "DETERMINED_DS_JOIN_TIMEOUT", 10.0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Once all are there, rank 0 may read a large checkpoint.
PATIENCE = timedelta(hours=2)
REMINDED_EVERY_S = 60.0
POLL_S = 0.1


class Meeting:
    """The ranks of one attempt, once all have come; a single rank needs no store.

    Args:
        placed: The place of this process.

    Attributes:
        again: Whether the launcher has given the same command before, on any machine.
        ranks: What each rank has said of itself, on rank 0: ``host``, ``machine``.

    Raises:
        ConfigError: the time that ranks may take to come is not a number.
        TrainingError: not all have come in time; those that are missing are named with their machine.
    """

    def __init__(self, placed: Placement) -> None:
        self._placed = placed
        restarts = int(os.environ.get(RESTART_COUNT, "0"))
        own: dict[str, Any] = {
            "host": socket.gethostname(),
            "machine": placed.machine,
            "restarts": restarts,
            "token": uuid.uuid4().hex,
        }
        self.again, self.ranks = restarts > 0, {placed.rank: own}
        if placed.size == 1:
            return
        limit_s = _join_timeout_s()
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
            self.again = self.share("again", attempt > 1 or any(r["restarts"] for r in self.ranks.values()))
        except RuntimeError as error:  # torch's
            reason = str(error).splitlines()[0].partition(". Exception raised")[0]
            if serves:
                words = f"cannot listen at {where}: {reason}"
                fix = "set MASTER_ADDR to an address of this machine, and MASTER_PORT to a free port"
            else:
                words = f"cannot reach rank 0 (machine 0, {where}): {reason}"
                fix = (
                    f"look at the launcher's output of machine 0, and whether {where} can be reached from here; "
                    f"where rank 0 takes longer to start: export {JOIN_TIMEOUT}=MINUTES"
                )
            who = f"rank {placed.rank} on {socket.gethostname()}"
            raise TrainingError(f"{who} {words}\n  fix: {fix}") from None
        if RESTART_COUNT in os.environ:  # the process group of each attempt has keys of its own by it
            os.environ[RESTART_COUNT] = str(attempt - 1)

    def _gather(self, limit_s: float) -> int:
        """Rank 0: wait for the others. Returns the number of the attempt, from 1."""
        attempt, began_s = int(self._all.add("attempts", 1)), time.monotonic()
        missing, reminded_s = set(range(1, self._placed.size)), began_s
        while missing:
            for rank in sorted(missing):
                if self._all.check([f"{attempt}/here/{rank}"]):
                    missing.discard(rank)
                elif self._all.check([f"rank/{rank}"]):
                    said = json.loads(self._all.get(f"rank/{rank}"))
                    if said != self.ranks.get(rank):  # one of an earlier attempt does not answer
                        self.ranks[rank] = said
                        self._all.set(said["token"], str(attempt))
            now_s = time.monotonic()
            if missing and now_s - began_s > limit_s:
                here = sorted({said["host"] for rank, said in self.ranks.items() if rank not in missing})
                raise TrainingError(
                    f"{self._named(missing)} not come within {in_words(limit_s)}; here: {', '.join(here)}\n"
                    "  fix: look at the launcher's output of that machine, and whether it reaches "
                    f"{self._placed.master_addr}:{self._placed.master_port}; where ranks take longer to start: "
                    f"export {JOIN_TIMEOUT}=MINUTES"
                )
            if missing and now_s - reminded_s > REMINDED_EVERY_S:
                reminded_s = now_s
                print(f"waiting: {self._named(missing)} not come yet", file=sys.stderr, flush=True)
            time.sleep(POLL_S if missing else 0.0)
        return attempt

    def _named(self, missing: set[int]) -> str:
        """The ranks that are missing, by their machines; a machine's name is known where another rank of it came."""
        hosts = {said["machine"]: said["host"] for rank, said in self.ranks.items() if rank not in missing}
        by_machine: dict[int, list[int]] = {}
        for rank in sorted(missing):
            by_machine.setdefault(rank // self._placed.local_size, []).append(rank)
        words = [
            f"machine {machine}{f' ({hosts[machine]})' if machine in hosts else ''}: "
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            for machine, ranks in by_machine.items()
        ]
        return f"{'; '.join(words)} {'have' if len(missing) > 1 else 'has'}"

    def _join(self, own: dict[str, Any]) -> int:
        """Any other rank: wait for rank 0. Returns the number of the attempt."""
        rank = self._placed.rank
        self._all.set(f"rank/{rank}", json.dumps(own))
        attempt = int(self._all.get(own["token"]))
        self._all.set(f"{attempt}/here/{rank}", "")
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
        for rank, said in sorted(self.ranks.items()):
            while not self._store.check([f"answer/{rank}"]):
                is_same = rank == 0 or json.loads(self._all.get(f"rank/{rank}"))["token"] == said["token"]
                if not is_same or time.monotonic() > until_s:
                    how = "has not answered" if is_same else "was started again before the run began"
                    raise TrainingError(
                        f"rank {rank} on {said['host']} {how}; see its launcher's output there"
                    )
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


def _join_timeout_s() -> float:
    stated = os.environ.get(JOIN_TIMEOUT) or str(JOIN_TIMEOUT_MINUTES)
    try:
        minutes = float(stated)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        message, fix = (
            "must be a number of minutes above 0",
            f"export {JOIN_TIMEOUT}={JOIN_TIMEOUT_MINUTES:g}",
        )
        raise ConfigError(Problem(key=JOIN_TIMEOUT, value=stated, message=message, fix=fix, code="launcher"))
    return 60 * minutes
