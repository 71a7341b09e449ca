"""The watch over ranks that hang or are lost, under every launcher.

A rank that loses another one is not always notified: where a cable is cut or a machine loses power no connection is
closed. So a thread of each rank shows a sign of life every second: in a folder under ``det-ds run``, else in the store
by which the ranks have met. Rank 0 compares the signs and publishes its verdict, which the others read. The watch
begins once the ranks have joined. Where nothing moves for the hang timeout, every rank shows its stack, reports which
rank hangs or is lost, and ends. Until the first batch, what a process does counts as progress: Python code that moves
on, or a call that computes, reads or writes, here or in its children, such as compilers. A rank that is busy alone, for
example with an upload, says so, and is waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import psutil

from determined_ds.cluster.log import ERROR, lines_of
from determined_ds.errors import EXIT_CRASHED
from determined_ds.rundir.handed_on import (
    HANG_TIMEOUT,
    LAST_ACTS,
    STORE,
    copy_to_terminal,
    hang_timeout_s,
    in_words,
    report_failure,
    since,
)
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.records import HANG, LOST_MACHINE
from determined_ds.train.ending import on_cluster

INTERVAL_S = 1.0  # between two signs of life
FEW = 4  # intervals without a sign after which a rank counts as missing, once something has gone wrong
ENDS_WITHIN_S = 10.0  # a store that does not answer does not keep a process
GONE = "dead, stopped or cut off"
# Frames of a stack, innermost first, that are searched for those of a rank that waits for another one.
SHOWN_FRAMES = 6
WAITS = ("/torch/distributed/", "/deepspeed/comm/")
MOST_STACKS = 8  # that are shown, those that hang first
# What a process does at least, of its own or by its children, that downloads, reads or computes: a second of time, in
# each interval of the clock.
LEAST_CPU, LEAST_IO_BYTES = 0.01, 2**20
# A rank that computes in one call for longer than so many timeouts hangs all the same: NCCL waits by computing.
LONGEST_CALL = 6


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A rank's sign of life: its heartbeat, whether it waits for other ranks, and whether it no longer needs them."""

    count: int = 0  # only its changes matter
    steps: int = 0
    beats: int = 0
    patient: bool = False
    waits: bool = False
    done: bool = False


# ------------------------------------------------------------------------------------------- where signs are shown


class Board(Protocol):
    """Texts by name that all ranks see."""

    def write(self, name: str, text: str) -> None: ...

    def read(self, names: Sequence[str]) -> list[str]:
        """The texts; "" for one that nobody has written."""


class Folder:
    """A board of the ranks of one machine: a file for each text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(exist_ok=True)

    def write(self, name: str, text: str) -> None:
        partial = self._path / f"{name}.{os.getpid()}"
        partial.write_text(text)
        partial.rename(self._path / name)

    def read(self, names: Sequence[str]) -> list[str]:
        paths = [self._path / name for name in names]
        return [path.read_text() if path.exists() else "" for path in paths]


class Store:
    """A board on the server by which ranks have met, by a separate connection: a store answers one call at a time."""

    def __init__(self, server: Any, interval_s: float) -> None:
        import torch.distributed as dist

        attempt = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
        timeout = timedelta(seconds=max(1.0, FEW * interval_s))
        own = dist.TCPStore(server.host, server.port, is_master=False, timeout=timeout)
        self._store = dist.PrefixStore("/".join(("determined_ds/watch", *attempt)), own)

    def write(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def read(self, names: Sequence[str]) -> list[str]:
        return [self._store.get(name).decode() if self._store.check([name]) else "" for name in names]


# ------------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the ranks have to end: some show no sign of life, or all do, and the others wait for those behind."""

    lost: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    steps: int = 0  # batches trained by the slowest rank


class Judge:
    """Judges the ranks by their signs.

    Args:
        size: How many there are.
        timeout_s: How long one may show no sign of life, and all of them no progress.
        few_s: How long one may show no sign of life once something has gone wrong.
    """

    def __init__(self, size: int, *, timeout_s: float, few_s: float) -> None:
        self._timeout_s, self._few_s = timeout_s, few_s
        self._signs = [Sign()] * size
        self._silent_s = [0.0] * size
        self._still_s = 0.0

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have shown no sign of life lately."""
        return self._silent_for(self._few_s)

    def _silent_for(self, seconds: float) -> tuple[int, ...]:
        silent = zip(self._signs, self._silent_s, strict=True)
        return tuple(rank for rank, (sign, s) in enumerate(silent) if s >= seconds and not sign.done)

    def look(self, signs: Sequence[Sign], elapsed_s: float) -> Verdict | None:
        """Judge by the newest sign of each rank, so long after the call before; None where they may continue."""
        before, self._signs = self._signs, list(signs)
        if not any(sign.beats for sign in signs):  # they have not joined
            return None
        for rank, (old, new) in enumerate(zip(before, signs, strict=True)):
            self._silent_s[rank] = 0.0 if old.count != new.count else self._silent_s[rank] + elapsed_s
        moved = [(sign.steps, sign.beats) for sign in before] != [(sign.steps, sign.beats) for sign in signs]
        waited_for = moved or any(sign.patient or sign.done for sign in signs)
        self._still_s = 0.0 if waited_for else self._still_s + elapsed_s
        # Of a script only rank 0 reports any; a rank that is behind in its first batch is behind by one.
        counting = [sign for sign in signs if sign.steps or max(each.steps for each in signs) < 2]
        steps = min(sign.steps for sign in counting)
        if self._silent_for(self._timeout_s) or (self._still_s >= self._timeout_s and self.missing):
            return Verdict(lost=self.missing or self._silent_for(self._timeout_s), steps=steps)
        if self._still_s < self._timeout_s:
            return None
        slowest = [rank for rank, sign in enumerate(signs) if sign.steps == steps or sign not in counting]
        busy = [rank for rank in slowest if not signs[rank].waits]
        return Verdict(behind=tuple(busy or slowest), steps=steps)


# ------------------------------------------------------------------------------------------- a rank's part


class Watch:
    """This rank's part in the watch, in two threads: a board out of reach may block the one that writes for ever.

    Args:
        rank: Of this process.
        local_ranks: The ranks of this machine.
        names: Of the machine of each rank.
        board: Makes the connection to the board.
        timeout_s: How long nothing may move.
        is_over: Whether the ranks have left one another.
    """

    def __init__(
        self,
        rank: int,
        *,
        local_ranks: Sequence[int],
        names: Sequence[str],
        board: Callable[[float], Board],
        timeout_s: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._local_ranks, self._names = rank, local_ranks, names
        self._timeout_s, self._is_over = timeout_s, is_over
        self._interval_s = min(INTERVAL_S, timeout_s / 10)
        self._judge = Judge(len(names), timeout_s=timeout_s, few_s=FEW * self._interval_s)
        self._connect = board
        self._board: Board | None = None
        self._is_done = False
        self._ended = threading.Event()
        self._count = 0
        self._heard = [Sign()] * len(names)  # by rank 0, of all
        self._word: dict[str, Any] = {}  # of rank 0, for the others
        self._silence_s = 0.0  # of rank 0
        self._life = _Life(timeout_s)
        self._threads = [
            threading.Thread(target=task, name=f"watch{task.__name__}", daemon=True)
            for task in (self._talk, self._look)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._close)

    def stop(self) -> None:
        """This rank no longer needs the others, which are shown so."""
        if not self._is_done:
            self._is_done = True
            self._ended.set()
            with contextlib.suppress(Exception):
                self._show(self._connect(self._interval_s))

    def _close(self) -> None:
        """End its threads: Python aborts the process that ends while one of them is in a call of the store."""
        self._ended.set()
        for thread in self._threads:
            thread.join(ENDS_WITHIN_S)

    def _talk(self) -> None:
        while not self._ended.is_set():
            try:
                board = self._board = self._board or self._connect(self._interval_s)
                self._show(board)
                if self._rank == 0:
                    texts = board.read([str(rank) for rank in range(len(self._names))])
                    self._heard = [Sign(**json.loads(text)) if text else Sign() for text in texts]
                else:
                    self._word = json.loads(board.read(["word"])[0] or "{}")
            except Exception:  # the board may come back
                self._board = None
            self._ended.wait(self._interval_s)

    def _show(self, board: Board) -> None:
        self._count += 1
        board.write(str(self._rank), json.dumps(asdict(self._own_sign(self._count))))
        if self._rank == 0:
            board.write("word", json.dumps({**self._word, "count": self._count}))

    def _own_sign(self, count: int) -> Sign:
        files = [file for stack in _stacks() for file, _, _ in stack]
        return Sign(
            count=count,
            steps=HEART.steps,
            beats=HEART.beats,
            patient=bool(HEART.patient),
            waits=any(word in file for file in files for word in WAITS),
            done=self._is_done or HEART.rests,
        )

    def _look(self) -> None:
        """Judge, on a clock of this process: no time passes while it is stopped, or its machine sleeps."""
        last_s, word = time.monotonic(), self._word
        while not self._ended.wait(self._interval_s):
            if self._is_over() or HEART.rests:
                self.stop()
                return
            self._life.look()
            now_s = time.monotonic()
            elapsed_s, last_s = min(2 * self._interval_s, now_s - last_s), now_s
            if self._rank == 0:
                verdict = self._judge.look([self._own_sign(int(1e6 * now_s)), *self._heard[1:]], elapsed_s)
                self._word = {"missing": self._judge.missing, "verdict": verdict and asdict(verdict)}
            else:
                unheard = word == self._word and HEART.beats  # before it has joined, rank 0 need not be there
                self._silence_s = self._silence_s + elapsed_s if unheard else 0.0
                word = self._word
                verdict = Verdict(**word["verdict"]) if word.get("verdict") else None
                if self._silence_s >= self._timeout_s:
                    verdict = Verdict(lost=(0,))
            if verdict is not None:
                self._end(verdict)

    def _end(self, verdict: Verdict) -> None:
        """Show this rank's stack, report why with those of all, and end."""
        own, stacks = stack_lines(), {}
        with contextlib.suppress(Exception):
            board = self._connect(self._interval_s)
            board.write(f"stack{self._rank}", own)
            if self._rank == 0:
                board.write("word", json.dumps(self._word))
            time.sleep(2 * FEW * self._interval_s)  # the others have to read the verdict, and to answer
            ranks = dict.fromkeys((*verdict.behind, *range(len(self._names))))
            stacks = dict(zip(ranks, board.read([f"stack{rank}" for rank in ranks]), strict=True))
        stacks = {rank: text for rank, text in {**stacks, self._rank: own}.items() if text}
        reason = self._reason(verdict)
        fix = f"if a step may take longer, set {HANG_TIMEOUT}=MINUTES (0: no limit)"
        if verdict.lost:
            fix = "check the machine and its network, then resume from the last checkpoint"
        shown = [f"rank {rank} stands here, innermost call first:\n{stacks[rank]}" for rank in stacks]
        words = "\n".join([reason, *shown[:MOST_STACKS], f"  fix: {fix}"])
        cause = LOST_MACHINE if verdict.lost else HANG
        if not report_failure(words, EXIT_CRASHED, cause=cause, reason=reason) and self._speaks(verdict.lost):
            say(words)
        for act in LAST_ACTS:
            with contextlib.suppress(Exception):
                act(EXIT_CRASHED)
        os._exit(EXIT_CRASHED)

    def _speaks(self, lost: Sequence[int]) -> bool:
        """Whether this rank reports; one does for each machine."""
        return self._rank == min(rank for rank in self._local_ranks if rank not in lost or rank == self._rank)

    def _reason(self, verdict: Verdict) -> str:
        for_so_long = f"for {in_words(self._timeout_s)}"
        if verdict.lost:
            words = f"no sign of life from {self._named(verdict.lost)} {for_so_long}: {GONE}"
            if self._rank and list(verdict.lost) == [0] and self._names[0] != self._names[self._rank]:
                words += f"; ranks hear of one another through it, so {self._names[self._rank]} may be the one cut off"
            return words
        who = f"{self._named(verdict.behind)} hangs" if len(verdict.behind) == 1 else "the ranks hang"
        return f"{who}: nothing has moved {for_so_long}, {since(verdict.steps)}"

    def _named(self, ranks: Iterable[int]) -> str:
        machines: dict[str, list[str]] = {}
        for rank in ranks:
            machines.setdefault(self._names[rank], []).append(str(rank))
        several = len(set(self._names)) > 1 or not isinstance(self._board, Folder)
        return " and ".join(
            f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}{f' ({name})' if several else ''}"
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


class _Life:
    """Signs of progress of a process before its first batch."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._stack: list[tuple[str, int]] = []
        self._moved_s = self._counted_s = time.monotonic()
        self._done: tuple[float, int] | None = None

    def look(self) -> None:
        if HEART.steps or not HEART.beats:
            return
        now_s, frame = time.monotonic(), sys._current_frames().get(threading.main_thread().ident or 0)
        found = [(each.f_code.co_filename, each.f_lasti) for each, _ in traceback.walk_stack(frame)]
        if found != self._stack:
            self._stack, self._moved_s = found, now_s
            HEART.beat()
        if now_s - self._counted_s < min(10.0, self._timeout_s / 6):
            return
        before, self._done = self._done, _work_done()
        works = True  # where the system does not say
        if before is not None and self._done is not None:
            cpu_s, io_bytes = self._done[0] - before[0], self._done[1] - before[1]
            works = cpu_s >= LEAST_CPU * (now_s - self._counted_s) or io_bytes >= LEAST_IO_BYTES
        self._counted_s = now_s
        waits = any(word in file for file, _ in found[:SHOWN_FRAMES] for word in WAITS)
        if works and not waits and now_s - self._moved_s < LONGEST_CALL * self._timeout_s:
            HEART.beat()


def _work_done() -> tuple[float, int] | None:
    """Seconds of processors that this process and its children have taken, and bytes that they read and wrote.

    None where the system does not say.
    """
    seconds, num_bytes = 0.0, 0
    try:
        process = psutil.Process()
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(
                psutil.Error, AttributeError
            ):  # it has ended; or there are no such counters
                times = each.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
                counters = each.io_counters()
                num_bytes += counters.read_chars + counters.write_chars
    except (psutil.Error, OSError):
        return None
    return seconds, num_bytes


def _stacks() -> list[list[tuple[str, int, str]]]:
    """File, line and function of the innermost calls of all threads, the main one first."""
    main = threading.main_thread().ident
    stacks = []
    for _, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        walked = islice(traceback.walk_stack(frame), SHOWN_FRAMES)
        stacks.append([(each.f_code.co_filename, line, each.f_code.co_name) for each, line in walked])
    return stacks


def stack_lines() -> str:
    """The main thread's innermost calls, as Python's fault handler writes them."""
    return "\n".join(f'  File "{file}", line {line} in {name}' for file, line, name in _stacks()[0])


def say(text: str) -> None:
    """Print to stderr; in a task's log, as an error."""
    lines = lines_of(ERROR, text) if on_cluster() else [text]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    copy_to_terminal(text)  # of a launcher, where this rank's own output goes to a file


# ------------------------------------------------------------------------------------------- this process

_watch: Watch | None = None


def watch_from_start() -> None:
    """Of a rank of ``det-ds run``: show signs of life from now on, in a folder beside the file by which ranks meet."""
    global _watch
    there, timeout_s = os.environ.get(STORE), hang_timeout_s()
    if there and timeout_s:
        size = int(os.environ["WORLD_SIZE"])
        _watch = Watch(
            int(os.environ["RANK"]),
            local_ranks=range(size),
            names=[socket.gethostname()] * size,
            board=lambda _: Folder(Path(f"{there}-watch")),
            timeout_s=timeout_s,
        )


def watch_joined(distributed: Any, store: Any) -> None:
    """The ranks have joined, and are watched from now on until they leave their process group; a collective.

    Args:
        distributed: The ranks.
        store: By which they have met.
    """
    import torch.distributed as dist

    global _watch
    timeout_s = hang_timeout_s()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if _watch is None and distributed.size > 1 and timeout_s and isinstance(store, dist.TCPStore):
        machines = distributed.allgather((distributed.cross_rank, socket.gethostname()))
        here, group = distributed.cross_rank, dist.group.WORLD
        _watch = Watch(
            distributed.rank,
            local_ranks=[rank for rank, (machine, _) in enumerate(machines) if machine == here],
            names=[name for _, name in machines],
            board=lambda interval_s: Store(store, interval_s),
            timeout_s=timeout_s,
            is_over=lambda: dist.group.WORLD is not group,
        )
    HEART.begin()


def say_missing_ranks() -> None:
    """Report which ranks show no more signs of life, after an error that another rank caused."""
    if _watch is not None:
        _watch.say_missing()


def leave_watch() -> None:
    """This rank no longer needs the others."""
    if _watch is not None:
        _watch.stop()
