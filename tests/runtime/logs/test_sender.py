"""Training waits for no tool: one that is not there is warned of once, and the end of a run does not wait for long."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from determined_ds.protocol.launches import Launch
from determined_ds.protocol.run_dir import RunDir
from determined_ds.runtime.logs import sender
from determined_ds.runtime.logs.identity import RunHere, shown_run
from determined_ds.runtime.logs.sender import TeamTools
from tests.runtime.logs.reading import csv_rows, points_of

LAUNCH = Launch(time=0.0, name="tiny")


@pytest.fixture
def sink(tmp_path: Path) -> Callable[..., TeamTools]:
    """``sink(csv={}, mlflow={...})``: a sink of a run in ``tmp_path``."""

    def make(**tools: Any) -> TeamTools:
        about = partial(
            shown_run,
            run=RunHere(there=RunDir(tmp_path)),
            exp_conf={},
            tools=tools,
            folder=tmp_path,
            events=tmp_path,
        )
        return TeamTools(about, tmp_path / "logging.log")

    return make


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The url of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_tool_that_never_answers_costs_a_bounded_wait_at_the_end(
    sink: Callable[..., TeamTools],
    silent_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sender, "LAST_S", 3.0)
    tools = sink(csv={}, mlflow={"tracking_uri": silent_server})
    tools.begin(LAUNCH)
    began = time.perf_counter()
    for step in range(1, 101):
        tools.report("training", step, {"loss": 1 / step})
    assert time.perf_counter() - began < 3, "it waited for the tool"
    with caplog.at_level(logging.WARNING):
        tools.end("completed")
    assert 3 <= time.perf_counter() - began < 30
    assert len(points_of(csv_rows(tmp_path / "metrics.csv"), "training/loss", "batches")) == 100
    assert "MLflow has not taken 100 reports of metrics" in caplog.text
    assert "CSV" not in caplog.text


def test_a_tool_that_refuses_is_warned_of_once_with_a_fix(
    sink: Callable[..., TeamTools], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "LAST_S", 1.0)
    tools = sink(mlflow={"tracking_uri": "http://127.0.0.1:9"})  # discard: nothing listens there
    with caplog.at_level(logging.WARNING):
        tools.begin(LAUNCH)
        tools.report("training", 1, {"loss": 1.0})
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
        tools.end("completed")
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2
    assert "mlflow does not take the run, which continues" in warned[0]
    assert "fix: see that the server of tracking_uri" in warned[0]
    assert "MLflow has not taken 1 report of metrics" in warned[1]


def test_the_process_ignores_what_asks_the_chief_to_stop_and_ends_with_it(
    sink: Callable[..., TeamTools], tmp_path: Path
) -> None:
    tools = sink(csv={})
    tools.begin(LAUNCH)
    assert tools._process is not None
    tools.report("training", 1, {"loss": 1.0})
    while not (tmp_path / "metrics.csv").is_file():
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(tools._process.pid, number)
    tools.report("training", 2, {"loss": 0.5})
    assert tools._process.stdin is not None
    tools._lines.put(None)  # the pipe is closed without a word, as where the chief is killed
    assert tools._process.wait(10) == 0
    assert points_of(csv_rows(tmp_path / "metrics.csv"), "training/loss", "batches") == [(1, 1.0), (2, 0.5)]


def test_a_process_that_is_killed_is_warned_of_and_training_goes_on(
    sink: Callable[..., TeamTools], caplog: pytest.LogCaptureFixture
) -> None:
    tools = sink(csv={})
    with caplog.at_level(logging.WARNING):
        tools.begin(LAUNCH)
        assert tools._process is not None
        tools._process.kill()
        tools._process.wait()
        for step in range(1, 4):
            tools.report("training", step, {"loss": 1.0})
            time.sleep(0.05)
        tools.end("completed")
    assert "is not reported to csv any more" in caplog.text
    assert "CSV file has not closed the run" in caplog.text


def test_a_file_of_the_user_is_no_module_of_a_client(
    sink: Callable[..., TeamTools], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("csv.py", "wandb.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    tools = sink(csv={})
    tools.begin(LAUNCH)
    tools.report("training", 1, {"loss": 1.0})
    tools.end("completed")
    assert points_of(csv_rows(tmp_path / "metrics.csv"), "training/loss", "batches") == [(1, 1.0)]
