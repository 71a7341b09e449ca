"""The panel on a terminal: it is drawn in place, everything else stands above it, and nothing of it is left."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from determined_ds.protocol.handed_on import PARENT
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.signals import STOP
from determined_ds.report.terminal.drawn_panel import OpenConsole
from determined_ds.runtime.loop import chief_display, live_panel, progress
from determined_ds.runtime.loop.live_panel import LivePanel
from tests.runtime.loop.screen import Screen

REPORT = {"loss": 3.0, "lr": 0.001, "samples_per_second": 164.2}
# What the launcher writes, see launch/interrupts.py.
ANNOUNCED = "\nSIGINT: stopping after this batch, with a checkpoint; again ends at once\n"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(live_panel, "ANNOUNCED_WITHIN_S", 0.0)
    return screen


@pytest.fixture
def panel(screen: Screen) -> Iterator[LivePanel]:
    panel = make(screen)
    panel.start(total=200, done=0, metric="validation_loss")
    yield panel
    panel.stop()


@pytest.fixture(autouse=True)
def not_stopped() -> Iterator[None]:
    yield
    STOP.clear()


def make(screen: Screen, records: Path | None = None) -> LivePanel:
    class Console(OpenConsole):
        @property
        def size(self):  # type: ignore[no-untyped-def,override]
            from rich.console import ConsoleDimensions

            return ConsoleDimensions(screen.columns, 40)

    return LivePanel(records, console=Console(file=screen, force_terminal=True, color_system=None))


def drawn(panel: LivePanel, batch: int) -> None:
    panel._next_s = 0.0
    panel.step(batch)


def test_it_is_drawn_in_place_and_leaves_nothing(screen: Screen, panel: LivePanel) -> None:
    for batch in range(1, 30):
        panel.report("training", batch, REPORT)
        drawn(panel, batch)
    assert [line[:12].rstrip() for line in screen.lines] == ["training", "loss", "lr", "speed", ""]
    assert screen.lines[0].startswith("training    batch 29/200  14 %")
    panel.stop()
    assert [line for line in screen.lines if line] == []
    screen.write("after it")
    assert screen.lines[0] == "after it"


def test_whatever_is_printed_or_logged_stands_above_it(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    logger = logging.getLogger("determined_ds.test_live_panel")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    panel = make(screen)
    panel.start(total=200, done=0)
    panel.note("checkpoint  batch 10  [abc]")
    print("of the trial")
    logger.warning("of a log")
    panel.report("validation", 10, {"batches": 10, "validation_loss": 2.5})
    drawn(panel, 11)
    panel.stop()
    assert [line for line in screen.lines if line] == [
        "checkpoint  batch 10  [abc]",
        "of the trial",
        "of a log",
        "validation  batch  10/200  validation_loss 2.5",
    ]
    assert handler.stream is sys.stderr
    logger.removeHandler(handler)


def test_training_reports_are_in_the_panel_alone(screen: Screen, panel: LivePanel) -> None:
    panel.report("training", 10, REPORT)
    panel.stop()
    assert not any("batch" in line for line in screen.lines)


def test_it_is_drawn_some_times_a_second_however_short_a_step(screen: Screen, panel: LivePanel) -> None:
    written, started, used = screen.written, time.monotonic(), time.thread_time()
    for batch in range(20_000):
        panel.step(batch)
    took = time.monotonic() - started
    draws = 1 + took / live_panel.DRAWN_EVERY_S
    assert screen.written - written < draws * 2_000
    assert time.thread_time() - used < 1.0  # 50 µs a step at most


def test_the_launchers_words_at_a_stop_stand_above_it(
    screen: Screen, panel: LivePanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT, "1")
    panel.note("before")
    panel.report("training", 10, REPORT)
    drawn(panel, 10)
    screen.write("^C")
    STOP.set()
    screen.write(ANNOUNCED)
    drawn(panel, 11)
    assert screen.lines[:3] == [
        "before",
        "stopping    after this batch, with a checkpoint; again ends at once",
        "training    batch 11/200  5 %  ━─────────────────────────────",
    ]
    panel.stop()
    assert [line for line in screen.lines if line] == screen.lines[:2]


def test_what_was_announced_before_it_was_there_stays(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT, "1")
    STOP.set()
    screen.write(ANNOUNCED)
    panel = make(screen)
    panel.start(total=200, done=0)
    panel.stop()
    assert screen.lines[1] == ANNOUNCED.strip()


def test_a_terminal_that_becomes_narrower_or_wider_shows_it_once(screen: Screen, panel: LivePanel) -> None:
    panel.note("above")
    panel.report("training", 10, REPORT)
    drawn(panel, 10)
    for columns in (40, 25, 200):
        screen.reflow(columns)
        drawn(panel, 11)
        assert screen.lines[0] == "above"
        assert [line[:2] for line in screen.lines[1:] if line] == ["tr", "lo", "lr", "sp"]


def test_a_resumed_run_shows_what_was_before(screen: Screen, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for batch in (10, 20):
        append_record(path, {"group": "training", "steps_completed": batch, "metrics": {"loss": 5.0 - batch}})
    best = {"group": "validation", "steps_completed": 20, "metrics": {"validation_loss": 1.5}}
    append_record(path, best)
    panel = make(screen, path)
    panel.start(total=200, done=20, metric="validation_loss")
    panel.report("validation", 30, {"validation_loss": 1.75})
    drawn(panel, 31)
    assert "validation  validation_loss 1.75  at batch 30  best 1.5 at 20" in screen.lines
    assert "checkpoint  batch 20" in screen.lines
    panel.stop()
    assert screen.lines[0] == "resumed at batch 20 of 200"


def test_checkpoints_are_shown_as_they_are_written(screen: Screen, panel: LivePanel) -> None:
    panel.checkpoints(None, 10)
    drawn(panel, 11)
    assert screen.lines[1] == "checkpoint  writing batch 10"
    panel.checkpoints(10, None)
    drawn(panel, 12)
    assert screen.lines[1] == "checkpoint  batch 10  0 s ago"


@pytest.mark.parametrize(
    ("is_terminal", "term", "shows"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)]
)
def test_it_is_for_terminals_that_can_show_it(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, term: str, shows: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert chief_display.shows_panel() is shows
    assert isinstance(chief_display.make_progress(True), LivePanel) is shows
    assert type(chief_display.make_progress(False)) is progress.Progress
