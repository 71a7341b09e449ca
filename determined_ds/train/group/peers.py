"""The ranks' watch over one another, where our launcher does not watch them: on a cluster, under torchrun and others.

A rank that loses another one is not always notified: where a cable is cut or a machine loses power no connection is
closed, and a rank that waits for that machine waits until its process group times out. So a thread of each rank writes
a sign of life to the store by which the ranks have met; rank 0 compares the signs of all and publishes its verdict,
which the others read. Where nothing moves for the hang timeout, each rank reports what is missing and ends. A rank that
is busy alone, for example with an upload, still shows signs of life, and is waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from determined_ds.cluster_log import ERROR, lines_of
from determined_ds.errors import EXIT_CRASHED
from determined_ds.rundir.handed_on import (
    HANG_TIMEOUT,
    LAST_ACTS,
    copy_to_terminal,
    in_words,
    report_failure,
    since,
)
from determined_ds.rundir.heartbeat import HEART, SHOWN_FRAMES, WAITS
from determined_ds.rundir.records import HANG, LOST_MACHINE
from determined_ds.train.master.ending import on_cluster

INTERVAL_S = 1.0  # between two signs of life
# Signs in a row that a rank may miss before it counts as missing, once something has gone wrong.
FEW = 4
PREFIX = "determined_ds/peers"
GONE = "dead, stopped or cut off"
MOST_STACKS = 8  # ranks that show theirs, those that hang first


@dataclass(frozen=True, kw_only=True)
class PeerSign:
    """A rank's sign of life.

    Args:
        count: Of its signs; only its changes matter.
        steps: Batches trained; 0 before this process has trained one.
        beats: Signs of progress, see :class:`~determined_ds.rundir.heartbeat.Heartbeat`.
        patient: Whether it may now take any time.
        waits: Whether it waits for other ranks.
        done: Whether it no longer needs the others.
    """

    count: int = 0
    steps: int = 0
    beats: int = 0
    patient: bool = False
    waits: bool = False
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class PeerVerdict:
    """Why the ranks have to end.

    Args:
        lost: Ranks without a sign of life.
        behind: Ranks that the others wait for, where all show signs of life.
        steps: Batches trained by the slowest rank.
    """

    lost: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    steps: int = 0


class RollCall:
    """Judges the ranks by their signs.

    Args:
        size: How many there are.
        timeout_s: How long one may show no sign of life, and all of them no progress.
        few_s: How long one may show no sign of life once something has gone wrong.
    """

    def __init__(self, size: int, *, timeout_s: float, few_s: float) -> None:
        self._timeout_s = timeout_s
        self._few_s = few_s
        self._signs = [PeerSign()] * size
        self._silent_s = [0.0] * size
        self._still_s = 0.0

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have shown no sign of life lately."""
        return self._silent_for(self._few_s)

    def _silent_for(self, seconds: float) -> tuple[int, ...]:
        silent = zip(self._signs, self._silent_s, strict=True)
        return tuple(rank for rank, (sign, s) in enumerate(silent) if s >= seconds and not sign.done)

    def look(self, signs: Sequence[PeerSign], elapsed_s: float) -> PeerVerdict | None:
        """Judge by the newest signs.

        Args:
            signs: The last one of each rank.
            elapsed_s: Since the call before.

        Returns:
            Why the ranks have to end; None where they may continue.
        """
        before, self._signs = self._signs, list(signs)
        for rank, (old, new) in enumerate(zip(before, signs, strict=True)):
            self._silent_s[rank] = 0.0 if old.count != new.count else self._silent_s[rank] + elapsed_s
        moved = [(sign.steps, sign.beats) for sign in before] != [(sign.steps, sign.beats) for sign in signs]
        waited_for = moved or any(sign.patient or sign.done for sign in signs)
        self._still_s = 0.0 if waited_for else self._still_s + elapsed_s
        steps = min(sign.steps for sign in signs)
        if self._silent_for(self._timeout_s) or (self._still_s >= self._timeout_s and self.missing):
            return PeerVerdict(lost=self.missing or self._silent_for(self._timeout_s), steps=steps)
        if self._still_s < self._timeout_s:
            return None
        slowest = [rank for rank, sign in enumerate(signs) if sign.steps == steps]
        busy = [rank for rank in slowest if not signs[rank].waits]
        return PeerVerdict(behind=tuple(busy or slowest), steps=steps)


class Peers:
    """This rank's part in the watch. The constructor shows the first sign; a collective makes sure of the others'.

    Args:
        rank: Of this process.
        local_ranks: The ranks of this machine.
        names: Of the machine of each rank.
        store: By which the ranks have met.
        timeout_s: As of :class:`RollCall`.
    """

    def __init__(
        self, rank: int, *, local_ranks: Sequence[int], names: Sequence[str], store: Any, timeout_s: float
    ) -> None:
        self._rank = rank
        self._local_ranks = local_ranks
        self._names = names
        self._timeout_s = timeout_s
        self._interval_s = min(INTERVAL_S, timeout_s / 10)
        self._roll = RollCall(len(names), timeout_s=timeout_s, few_s=FEW * self._interval_s)
        self._store = store
        server = _innermost(store)
        self._address = (server.host, server.port)
        attempt = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
        self._prefix = "/".join((PREFIX, *attempt))
        self._ended = threading.Event()
        self._count = 0
        self._heard: list[PeerSign] = [PeerSign()] * len(names)  # by rank 0, of all
        self._word: dict[str, Any] = {}  # of rank 0, for the others
        self._silence_s = 0.0  # of rank 0
        self._show(dist.PrefixStore(self._prefix, store))

    def start(self) -> None:
        """Start, after every rank has constructed its own."""
        for task in (self._talk, self._look):
            threading.Thread(target=task, name=f"peers{task.__name__}", daemon=True).start()

    def stop(self) -> None:
        """This rank no longer needs the others."""
        self._ended.set()
        with contextlib.suppress(Exception):
            self._show(dist.PrefixStore(self._prefix, self._store))

    # ------------------------------------------------------------------------------------ the store

    def _talk(self) -> None:
        """Write this rank's signs, and read the others'. A store out of reach may block this thread for ever."""
        store = None
        while not self._ended.wait(self._interval_s):
            try:
                store = store or self._connect()
                self._show(store)
                if self._rank == 0:
                    self._heard = [_sign(each) for each in store.multi_get(self._keys())]
                else:
                    self._word = json.loads(store.get("word"))
            except Exception:  # the store may come back
                store = None

    def _connect(self) -> Any:
        """A separate connection: a store answers one call at a time, and other threads may wait in theirs."""
        host, port = self._address
        timeout = timedelta(seconds=max(1.0, FEW * self._interval_s))
        return dist.PrefixStore(self._prefix, dist.TCPStore(host, port, is_master=False, timeout=timeout))

    def _show(self, store: Any) -> None:
        self._count += 1
        store.set(str(self._rank), json.dumps(asdict(self._own_sign())))
        if self._rank == 0:
            store.set("word", json.dumps({**self._word, "count": self._count}))

    def _own_sign(self) -> PeerSign:
        steps, beats, patient, resting = HEART.state
        done = self._ended.is_set() or resting
        waits = any(word in frame.filename for frame in _stack() for word in WAITS)
        return PeerSign(
            count=self._count, steps=steps, beats=beats, patient=bool(patient), waits=waits, done=done
        )

    def _keys(self) -> list[str]:
        return [str(rank) for rank in range(len(self._names))]

    # ------------------------------------------------------------------------------------ the clock

    def _look(self) -> None:
        """Judge, on a clock of this process: no time passes while it is stopped, or its machine sleeps."""
        last_s, word = time.monotonic(), self._word
        group = dist.group.WORLD
        while not self._ended.wait(self._interval_s):
            if dist.group.WORLD is not group or HEART.state[3]:  # it has left the others, or is about to
                self.stop()
                return
            now_s = time.monotonic()
            elapsed_s, last_s = min(2 * self._interval_s, now_s - last_s), now_s
            if self._rank == 0:
                own = replace(self._own_sign(), count=int(1e6 * now_s))
                verdict = self._roll.look([own, *self._heard[1:]], elapsed_s)
                self._word = {"missing": self._roll.missing, "verdict": verdict and asdict(verdict)}
            else:
                self._silence_s = 0.0 if word != self._word else self._silence_s + elapsed_s
                word = self._word
                verdict = PeerVerdict(**word["verdict"]) if word.get("verdict") else None
                if self._silence_s >= self._timeout_s:
                    verdict = PeerVerdict(lost=(0,))
            if verdict is not None:
                self._end(verdict)

    def _end(self, verdict: PeerVerdict) -> None:
        """Report why, leave the others the time to read it, and end."""
        words = self._words_of(verdict)
        report_failure(words, EXIT_CRASHED, cause=LOST_MACHINE if verdict.lost else HANG, reason=words)
        if self._speaks(verdict.lost):
            say(words)
        if verdict.behind and self._rank in [*verdict.behind, *range(len(self._names))][:MOST_STACKS]:
            say(f"rank {self._rank} stands here, innermost call first:", stack_lines())
        time.sleep(2 * FEW * self._interval_s)
        for act in LAST_ACTS:
            with contextlib.suppress(Exception):
                act(EXIT_CRASHED)
        os._exit(EXIT_CRASHED)

    def _speaks(self, lost: Sequence[int]) -> bool:
        """Whether this rank reports; one does for each machine."""
        return self._rank == min(rank for rank in self._local_ranks if rank not in lost or rank == self._rank)

    def _words_of(self, verdict: PeerVerdict) -> str:
        for_so_long = f"for {in_words(self._timeout_s)}"
        if verdict.lost:
            words = f"no sign of life from {self._named(verdict.lost)} {for_so_long}: {GONE}"
            if self._rank and list(verdict.lost) == [0] and self._names[0] != self._names[self._rank]:
                words += f"; ranks hear of one another through it, so {self._names[self._rank]} may be the one cut off"
            return f"{words}\n  fix: check the machine and its network, then resume from the last checkpoint"
        who = f"{self._named(verdict.behind)} hangs" if len(verdict.behind) == 1 else "the ranks hang"
        return (
            f"{who}: nothing has moved {for_so_long}, {since(verdict.steps)}\n"
            f"  fix: if a step may take longer, set {HANG_TIMEOUT}=MINUTES (0: no limit)"
        )

    def _named(self, ranks: Iterable[int]) -> str:
        machines: dict[str, list[str]] = {}
        for rank in ranks:
            machines.setdefault(self._names[rank], []).append(str(rank))
        return " and ".join(
            f"rank{'s' if len(found) > 1 else ''} {', '.join(found)} ({name})"
            for name, found in machines.items()
        )

    def say_missing(self) -> None:
        """After an error that another rank caused: wait a moment, and report which one shows no signs of life."""
        until_s = time.monotonic() + 3 * FEW * self._interval_s
        missing: tuple[int, ...] = ()
        while not missing and time.monotonic() < until_s:
            time.sleep(self._interval_s)
            silent = self._rank and self._silence_s >= FEW * self._interval_s
            missing = (0,) if silent else tuple(self._word.get("missing", ()))
        if missing and self._speaks(missing):
            say(f"no sign of life from {self._named(missing)}: {GONE}")


def _sign(text: bytes) -> PeerSign:
    return PeerSign(**json.loads(text))


def is_on_network(store: Any) -> bool:
    """Whether ranks meet by a server, and not by a file or in memory."""
    return isinstance(_innermost(store), dist.TCPStore)


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _stack() -> list[traceback.FrameSummary]:
    """Of the main thread, innermost call first; only files and names."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = traceback.StackSummary.extract(
        traceback.walk_stack(frame), limit=SHOWN_FRAMES, lookup_lines=False
    )
    return list(found)


def stack_lines() -> str:
    """The main thread's innermost calls, as Python's fault handler writes them."""
    return "\n".join(f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in _stack())


def say(*text: str) -> None:
    """Print to stderr; in a task's log, as an error."""
    whole = "\n".join(text)
    lines = lines_of(ERROR, whole) if on_cluster() else [whole]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    copy_to_terminal(whole)  # of a launcher, where this rank's own output goes to a file


_peers: Peers | None = None


def watch_peers(distributed: Any, store: Any, timeout_s: float) -> None:
    """Have the ranks watch one another from now on, until they leave their process group; a collective.

    Args:
        distributed: The ranks.
        store: By which they have met.
        timeout_s: As of :class:`RollCall`.
    """
    global _peers
    machines = distributed.allgather((distributed.cross_rank, socket.gethostname()))
    local = [rank for rank, (machine, _) in enumerate(machines) if machine == distributed.cross_rank]
    names = [name for _, name in machines]
    peers = Peers(distributed.rank, local_ranks=local, names=names, store=store, timeout_s=timeout_s)
    distributed.allgather(None)
    peers.start()
    _peers = peers


def say_missing_peers() -> None:
    """Report which ranks show no more signs of life, after an error that another rank caused."""
    if _peers is not None:
        _peers.say_missing()


def leave_peers() -> None:
    """This rank no longer needs the others."""
    if _peers is not None:
        _peers.stop()
