"""A tool that fails is tried again, one that hangs is left behind, and what it has not taken is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from determined_ds.runtime.logs import tool_thread
from determined_ds.runtime.logs.messages import NumbersAt
from determined_ds.runtime.logs.tool_thread import ToolThread


class FakeTool:
    """Takes reports, unless ``failing`` is set; waits while ``hanging`` is set."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.calls: list[str] = []
        self.failing = False
        self.released = threading.Event()
        self.released.set()

    def begin(self) -> str:
        self._called("begin")
        return "somewhere"

    def report(self, reports: list[NumbersAt]) -> None:
        self._called("report")
        self.steps += [report.step for report in reports]

    def end(self, status: str) -> None:
        self._called(status)

    def _called(self, what: str) -> None:
        self.released.wait()
        if self.failing:
            raise ConnectionError("no way there\nsecond line")
        self.calls.append(what)


class Delivered:
    """A thread with a fake tool, and what it says."""

    def __init__(self) -> None:
        self.tool = FakeTool()
        self.said: list[str] = []
        self.warned: list[str] = []
        self.thread: ToolThread | None = None

    def start(self) -> ToolThread:
        self.thread = ToolThread("fake", self.tool, say=self.said.append, warn=self.warned.append)
        return self.thread

    def close(self) -> None:
        self.tool.failing = False
        self.tool.released.set()
        if self.thread is not None:
            self.thread.finish("completed")
            self.thread.join(time.monotonic() + 5)


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    monkeypatch.setattr(tool_thread, "EVERY_S", 0.01)
    monkeypatch.setattr(tool_thread, "FIRST_WAIT_S", 0.01)
    return Delivered()


def at(step: int) -> NumbersAt:
    return NumbersAt(step, 0.0, {"training/loss": 1.0})


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_that_was_put_is_taken_in_order_before_the_end(delivered: Delivered) -> None:
    thread = delivered.start()
    for step in range(1, 1201):  # more than are taken at once
        thread.put(at(step))
    thread.finish("stopped")
    thread.join(time.monotonic() + 10)
    assert delivered.tool.steps == list(range(1, 1201))
    assert (delivered.tool.calls[0], delivered.tool.calls[-1]) == ("begin", "stopped")
    assert (delivered.said, delivered.warned) == (["fake: somewhere"], [])
    assert (thread.num_unsent, thread.is_closed) == (0, True)


def test_a_failure_is_warned_of_once_and_nothing_is_lost(delivered: Delivered) -> None:
    delivered.tool.failing = True
    thread = delivered.start()
    for step in (1, 2, 3):
        thread.put(at(step))
    until(lambda: bool(delivered.warned))
    assert thread.num_unsent == 3
    delivered.tool.failing = False
    until(lambda: delivered.tool.steps == [1, 2, 3])
    delivered.tool.failing = True
    thread.put(at(4))
    until(lambda: thread.num_unsent == 1)
    delivered.close()
    assert delivered.tool.steps == [1, 2, 3, 4]
    assert delivered.warned == ["does not take the run, which continues: no way there; it is tried again"]


def test_what_a_tool_that_hangs_has_not_taken_is_counted(
    delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_thread, "SLOW_S", 0.05)
    delivered.tool.released.clear()
    thread = delivered.start()
    thread.put(at(1))
    time.sleep(0.1)
    thread.put(at(2))
    thread.put(at(3))
    thread.finish("completed")
    began = time.monotonic()
    thread.join(began + 0.2)
    assert time.monotonic() - began < 10
    assert (thread.num_unsent, thread.is_closed) == (3, False)
    assert delivered.warned == ["has not answered for 0 s; the run continues"]
    delivered.close()


def test_the_oldest_are_lost_where_too_many_wait(
    delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_thread, "MOST_WAITING", 3)
    delivered.tool.released.clear()
    thread = delivered.start()
    for step in range(1, 6):
        thread.put(at(step))
    assert thread.num_unsent == 5
    delivered.close()
    assert delivered.tool.steps == [3, 4, 5]
    assert thread.num_unsent == 2
