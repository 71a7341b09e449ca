"""Throughput is over the time from the first batch after a pause until the device has done what it was asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from determined_ds.runtime.loop import reporting
from determined_ds.runtime.loop.progress import Progress
from determined_ds.runtime.loop.reporting import Reporter
from determined_ds.runtime.rank_memory import RankMemory

BACKLOG_S = 8.0


class Queue:
    """A device that works on long after it was asked: the reduction waits for it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def reduce_with(self, riders: torch.Tensor) -> tuple[dict[str, float], list[float]]:
        self.now_s += BACKLOG_S
        return {"loss": 1.0}, riders.tolist()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(reporting, "time", SimpleNamespace(perf_counter=lambda: made.now_s))
    return made


def reporter_of(device: str = "cpu") -> Reporter:
    engine = SimpleNamespace(
        optimizer=None,
        skipped_steps=0,
        get_global_grad_norm=lambda: None,
        fp16_enabled=lambda: False,
    )
    context: Any = SimpleNamespace(
        _core=None,
        distributed=SimpleNamespace(rank=0, size=1),
        device=torch.device(device),
        models=[engine],
        reduce_metrics=lambda for_training: {},
        resolved=SimpleNamespace(batch=SimpleNamespace(global_batch_size=50)),
    )
    return Reporter(SimpleNamespace(), context, Progress())


def rate(reporter: Reporter, queue: Any) -> float:
    metrics, _ = reporter.reduce(queue, torch.zeros(0, dtype=torch.float64))
    return float(metrics["samples_per_second"])


def test_work_that_a_device_has_yet_to_do_counts(queue: Queue) -> None:
    reporter = reporter_of()
    for _ in range(2):
        reporter.batch_begins()
        queue.now_s += 1
    assert rate(reporter, queue) == 100 / (2 + BACKLOG_S)


def test_what_is_no_training_does_not_count(queue: Queue) -> None:
    """Neither what comes after a report, nor a validation between two of them."""
    reporter = reporter_of()
    reporter.batch_begins()
    rate(reporter, queue)
    queue.now_s += 1_000
    reporter.batch_begins()
    queue.now_s += 1
    reporter.pause()
    queue.now_s += 1_000
    reporter.batch_begins()
    queue.now_s += 1
    assert rate(reporter, queue) == 100 / (2 + BACKLOG_S)


def test_before_a_validation_a_gpu_is_waited_for(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has yet to train is training time, and none of the validation's."""
    backlogs_s = [BACKLOG_S, 0.0]

    def synchronize(device: torch.device) -> None:
        queue.now_s += backlogs_s.pop(0)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    nothing = RankMemory(peak_bytes=0, allocated_bytes=0, reserved_bytes=0)
    monkeypatch.setattr(reporting, "rank_memory", lambda device: nothing)
    reporter = reporter_of("cuda")
    reporter.batch_begins()
    queue.now_s += 1
    reporter.pause()
    queue.now_s += 1_000
    reporter.batch_begins()
    queue.now_s += 1
    assert rate(reporter, queue) == 100 / (1 + BACKLOG_S + 1 + BACKLOG_S)
