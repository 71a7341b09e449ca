"""The watch over ranks that hang or are lost, under every launcher. Loads no torch.

A rank that loses another one is not always notified: where a cable is cut or a machine loses power, no connection is
closed. So from the moment the ranks have joined, a thread of each shows a sign of life every second: in a folder under
``det-ds run``, else in the store by which they have met. Rank 0 compares the signs and publishes its verdict, which
the others read. Where nothing moves for the hang timeout, every rank shows its stack, reports which rank hangs or is
lost, and ends. A rank that is busy alone, for example with an upload, says so, and is waited for.

Before the first batch, Python code that moves on counts as progress, and so does one call that does not wait for other
ranks, for up to ``CALL_BEFORE_FIRST`` times the timeout: a compiler, a download, a large file.
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
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from determined_ds.cluster.log import ERROR, lines_of, on_cluster
from determined_ds.errors import EXIT_CRASHED
from determined_ds.rundir.handed_on import (
    HANG_TIMEOUT,
    LAST_ACTS,
    STORE,
    copy_to_terminal,
    hang_timeout_s,
    in_words,
    report_failure,
)
from determined_ds.rundir.records import HANG, LOST_MACHINE
from determined_ds.rundir.signals import HEART

INTERVAL_S = 1.0  # between two signs of life
FEW = 4  # intervals without a sign after which a rank counts as missing, once something has gone wrong
ENDS_WITHIN_S = 10.0  # a store that does not answer does not keep a process
CALL_BEFORE_FIRST = 6
# Frames of a stack, innermost first, that are searched for those of a rank that waits for another one.
SHOWN_FRAMES = 6
WAITS = ("/torch/distributed/", "/deepspeed/comm/")
MOST_STACKS = 8  # that are shown, those that hang first


class Sign(NamedTuple):
    """A rank's sign of life: its heartbeat, whether it waits for other ranks, and whether it no longer needs them."""

    number: int = 0  # only its changes matter
    steps: int = 0
    beats: int = 0
    patient: bool = False
    waits: bool = False
    done: bool = False


class Folder:
    """A store of torch's for the ranks of one machine: a file for each text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(exist_ok=True)

    def set(self, name: str, text: str) -> None:
        partial = self._path / f"{name}.{os.getpid()}"
        partial.write_text(text)
        partial.rename(self._path / name)

    def check(self, names: list[str]) -> bool:
        return all((self._path / name).exists() for name in names)

    def get(self, name: str) -> bytes:
        return (self._path / name).read_bytes()


def _read(board: Any, name: str) -> Any:
    return json.loads(board.get(name)) if board.check([name]) else None


class Watch:
    """This rank's part in the watch, in two threads: a board out of reach may block the one that writes for ever."""

    def __init__(
        self, distributed: Any, connect: Callable[[], Any], timeout_s: float, is_over: Callable[[], bool]
    ) -> None:
        self._rank, self._connect, self._is_over = distributed.rank, connect, is_over
        self._machines = distributed.allgather((distributed.cross_rank, socket.gethostname()))
        self._timeout_s, self._interval_s = timeout_s, min(INTERVAL_S, timeout_s / 10)
        self._few_s = FEW * self._interval_s
        self._ended, self._is_done = threading.Event(), False  # done: it no longer needs the others
        self._heard = [Sign()] * len(self._machines)  # by rank 0, of all
        self._word: dict[str, Any] = {}  # of rank 0, for the others
        self._threads = [threading.Thread(target=task, daemon=True) for task in (self._talk, self._look)]
        for thread in self._threads:
            thread.start()
        atexit.register(self.end)

    def end(self, *, is_done: bool = False) -> None:
        """End its threads: Python aborts the process that ends while one of them is in a call of the store."""
        self._is_done = self._is_done or is_done
        self._ended.set()
        for thread in self._threads:
            thread.join(ENDS_WITHIN_S)

    def _own_sign(self, number: int) -> Sign:
        waits = any(map(_waits, sys._current_frames().values()))
        done = self._is_done or HEART.rests
        return Sign(number, HEART.steps, HEART.beats, bool(HEART.patient), waits, done)

    def _talk(self) -> None:
        board, count, is_last = None, 0, False
        while not is_last:
            is_last, count = self._ended.wait(self._interval_s), count + 1
            try:
                board = board or self._connect()
                board.set(str(self._rank), json.dumps(self._own_sign(count)))
                if self._rank == 0:
                    board.set("word", json.dumps({**self._word, "count": count}))
                    ranks = range(len(self._machines))
                    self._heard = [Sign(*_read(board, str(rank)) or ()) for rank in ranks]
                else:
                    self._word = _read(board, "word") or {}
            except Exception:  # the board may come back
                board = None

    def _look(self) -> None:
        """Judge, on a clock of this process: no time passes while it is stopped, or its machine sleeps.

        Rank 0 judges by the newest sign of each rank: ``lost`` are ranks without a sign; else ``behind`` those that
        others wait for; ``steps`` those of the slowest.
        """
        last_s = moved_s = time.monotonic()
        still_s, silent_s = (
            0.0,
            [0.0] * len(self._machines),
        )  # since anything moved; since a rank showed a sign
        signs, word, stack = self._heard, self._word, list[tuple[str, int]]()
        verdict: dict[str, Any] | None
        while not self._ended.wait(self._interval_s):
            if self._is_over() or HEART.rests:
                self._is_done = True
                self._ended.set()
                return
            now_s = time.monotonic()
            if not HEART.steps:  # before the first batch, what the main thread does is a sign of progress
                frame, before_it = _main_frame(), stack
                stack = [(each.f_code.co_filename, each.f_lasti) for each, _ in traceback.walk_stack(frame)]
                moved_s = moved_s if stack == before_it else now_s
                is_long = now_s - moved_s > CALL_BEFORE_FIRST * self._timeout_s
                if stack != before_it or not (is_long or _waits(frame)):
                    HEART.beat()
            elapsed_s, last_s = min(2 * self._interval_s, now_s - last_s), now_s
            if self._rank:
                silent_s[0] = silent_s[0] + elapsed_s if word == self._word else 0.0
                word = self._word
                verdict = word.get("verdict")
                if silent_s[0] >= self._timeout_s:
                    verdict = {"lost": [0], "behind": [], "steps": 0}
            else:
                before, signs = signs, [self._own_sign(int(1e6 * now_s)), *self._heard[1:]]
                for rank, (old, new) in enumerate(zip(before, signs, strict=True)):
                    silent_s[rank] = (
                        0.0 if new.done or old.number != new.number else silent_s[rank] + elapsed_s
                    )
                moves = [sign[1:3] for sign in before] != [sign[1:3] for sign in signs]  # steps and beats
                waited_for = moves or any(sign.patient or sign.done for sign in signs)
                still_s = 0.0 if waited_for else still_s + elapsed_s
                # Of a script only rank 0 reports any; a rank that is behind in its first batch is behind by one.
                counting = [sign for sign in signs if sign.steps or max(each.steps for each in signs) < 2]
                steps = min(sign.steps for sign in counting)
                slowest = [r for r, sign in enumerate(signs) if sign.steps == steps or sign not in counting]
                busy = [rank for rank in slowest if not signs[rank].waits]
                missing = [rank for rank, s in enumerate(silent_s) if s >= self._few_s]
                is_still, verdict = still_s >= self._timeout_s, None
                if max(silent_s) >= self._timeout_s or (is_still and missing):
                    verdict = {"lost": missing, "behind": [], "steps": steps}
                elif is_still:
                    verdict = {"lost": [], "behind": busy or slowest, "steps": steps}
                self._word = {"verdict": verdict}
            if verdict is not None:
                self._end_run(**verdict)

    def _end_run(self, lost: list[int], behind: list[int], steps: int) -> None:
        """Show this rank's stack, report why with those of all, and end."""
        frames = islice(traceback.walk_stack(_main_frame()), SHOWN_FRAMES)
        own = [f'  File "{f.f_code.co_filename}", line {line} in {f.f_code.co_name}' for f, line in frames]
        stacks = {self._rank: "\n".join(own)}
        with contextlib.suppress(Exception):
            board = self._connect()
            board.set(f"stack{self._rank}", json.dumps(stacks[self._rank]))
            if self._rank == 0:
                board.set("word", json.dumps(self._word))
            time.sleep(2 * self._few_s)  # the others have to read the verdict, and to answer
            ranks = range(len(self._machines))
            stacks |= {rank: text for rank in ranks if (text := _read(board, f"stack{rank}"))}
        for_so_long = f"for {in_words(self._timeout_s)}"
        if lost:
            reason = f"no sign of life from {self._named(lost)} {for_so_long}: dead, stopped or cut off"
            fix = "check the machine and its network, then resume from the last checkpoint"
        else:
            who = f"{self._named(behind)} hangs" if len(behind) == 1 else "the ranks hang"
            since = f"since batch {steps}" if steps else "before the first batch"
            reason = f"{who}: nothing has moved {for_so_long}, {since}"
            fix = f"if a step may take longer, set {HANG_TIMEOUT}=MINUTES (0: no limit)"
        shown = sorted(stacks, key=lambda rank: (rank not in behind, rank))[:MOST_STACKS]
        standing = [f"rank {rank} stands here, innermost call first:\n{stacks[rank]}" for rank in shown]
        words = "\n".join([reason, *standing, f"  fix: {fix}"])
        here = self._machines[self._rank]
        left = [r for r, each in enumerate(self._machines) if each == here and r not in lost]
        is_read = report_failure(words, EXIT_CRASHED, cause=LOST_MACHINE if lost else HANG, reason=reason)
        if not is_read and self._rank == min(left, default=self._rank):  # one of each machine
            lines = lines_of(ERROR, words) if on_cluster() else [words]
            print(*lines, sep="\n", file=sys.stderr, flush=True)
            copy_to_terminal(words)  # of a launcher, where this rank's own output goes to a file
        for act in LAST_ACTS:
            with contextlib.suppress(Exception):
                act(EXIT_CRASHED)
        os._exit(EXIT_CRASHED)

    def _named(self, ranks: list[int]) -> str:
        several = len(set(self._machines)) > 1
        return " and ".join(f"rank {r}{f' ({self._machines[r][1]})' if several else ''}" for r in ranks)


def _main_frame() -> Any:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waits(frame: Any) -> bool:
    """Whether a thread that stands there waits for other ranks."""
    innermost = islice(traceback.walk_stack(frame), SHOWN_FRAMES)
    return any(word in each.f_code.co_filename for each, _ in innermost for word in WAITS)


_watch: Watch | None = None  # of this process


def watch_joined(distributed: Any, store: Any) -> None:
    """The ranks have joined by a store, and are watched from now on until they leave their group; a collective."""
    import torch.distributed as dist

    global _watch
    timeout_s, folder, group = hang_timeout_s(), os.environ.get(STORE), dist.group.WORLD
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store

    def connect() -> Any:
        if folder:
            return Folder(Path(f"{folder}-watch"))
        # By a separate connection: a store answers one call at a time.
        timeout = timedelta(seconds=max(1.0, FEW * min(INTERVAL_S, timeout_s / 10)))
        own = dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
        attempt = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
        return dist.PrefixStore("/".join(("determined_ds/watch", *attempt)), own)

    is_met = folder or (distributed.size > 1 and isinstance(store, dist.TCPStore))
    HEART.begin()
    if _watch is None and timeout_s and is_met:
        _watch = Watch(distributed, connect, timeout_s, lambda: dist.group.WORLD is not group)


def leave_watch() -> None:
    """This rank no longer needs the others."""
    if _watch is not None:
        _watch.end(is_done=True)
