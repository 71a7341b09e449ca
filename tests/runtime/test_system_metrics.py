"""Determined's system metrics in a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from determined import core

from determined_ds.runtime import system_metrics
from determined_ds.runtime.system_metrics import LocalProfiler


class Alone:
    local_rank = 0


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "system_metrics.jsonl").read_text().splitlines()]


def profiler(folder: Path, distributed: Any = Alone) -> LocalProfiler:
    return LocalProfiler(folder, distributed)


def test_a_line_for_each_group_and_what_is_left_at_the_end(tmp_path: Path) -> None:
    one = profiler(tmp_path)
    assert isinstance(one, core.ProfilerContext)
    one.on(sampling_interval=1, samples_per_report=10)
    one.on()  # which changes nothing
    time.sleep(0.3)
    one._close()
    groups = [line["group"] for line in lines(tmp_path)]
    assert {"cpu", "memory"} <= set(groups)
    assert len(groups) == len(set(groups))
    one.off()


def test_the_first_rank_of_a_machine_measures_it(tmp_path: Path) -> None:
    class Second:
        local_rank = 1

    second = profiler(tmp_path, Second)
    second.on()
    second.off()
    assert not (tmp_path / "system_metrics.jsonl").exists()


def test_what_a_machine_does_not_tell_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have no counters of its disks."""

    class Mute:
        group = "mute"

        def __init__(self) -> None:
            self.metric_samples: list[Any] = []

        def sample_metrics(self) -> None:
            raise AttributeError("'NoneType' object has no attribute 'read_bytes'")

    monkeypatch.setattr(system_metrics, "COLLECTORS", (Mute, system_metrics.COLLECTORS[1]))
    one = profiler(tmp_path)
    one.on()
    time.sleep(0.3)
    one.off()
    assert [line["group"] for line in lines(tmp_path)] == ["memory"]
