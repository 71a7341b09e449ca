"""``metrics.jsonl`` survives whatever ends a run, and a checkpoint comes after the lines that it counts on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.documents.writing import write_whole
from determined_ds.protocol.metrics_file import MetricsReader, append_record, kept_until, read_records
from determined_ds.runtime.local_core import AtomicStorage
from tests.command import ROOT

WRITER = """
import sys
from pathlib import Path
from determined_ds.protocol.metrics_file import append_record
step = 0
while True:
    step += 1
    record = {"group": "training", "steps_completed": step, "metrics": {"loss": "x" * 20_000}}
    append_record(Path(sys.argv[1]), record)
    print(step, flush=True)
"""


def go_on(path: Path, steps: int) -> None:
    """As a run does that goes on from a checkpoint."""
    kept = kept_until(path, steps)
    if kept is not None:
        write_whole(path, kept)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["steps_completed"] for line in path.read_text().splitlines()]


def test_what_a_killed_run_has_reported_is_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(20)]
        writer.kill()
        said += [int(line) for line in writer.stdout.read().split()]
    go_on(path, 10**9)
    steps = steps_in(path)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= said[-1]


def test_going_on_forgets_later_batches_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_record(path, {"steps_completed": step})
    with path.open("a") as file:
        file.write('{"steps_completed": 1, "metr')
    go_on(path, 2)
    assert steps_in(path) == [1, 2]
    append_record(path, {"steps_completed": 3})
    assert steps_in(path) == [1, 2, 3]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_full_disk_takes_nothing_that_was_reported(small_disk: Callable[[int], Path]) -> None:
    path = small_disk(64 * 1024) / "metrics.jsonl"
    record = {"steps_completed": 1, "metrics": {"x": "x" * 9_000}}
    for _ in range(7):
        append_record(path, record)
    with pytest.raises(OSError, match="No space left"):
        append_record(path, record)
    with pytest.raises(OSError, match="No space left"):
        go_on(path, 10)
    assert read_records(path)[:7] == [{"group": "", **record}] * 7


def test_metrics_are_on_the_disk_before_a_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_record(metrics, {})
    storage = AtomicStorage(str(tmp_path / "checkpoints"), metrics)
    partial = storage.pre_store_path("uuid")
    (partial / "file").write_text("weights")
    done: list[str] = []

    def note(name: str) -> None:
        real = getattr(os, name)

        def noting(first: Any, *rest: Any) -> Any:
            what = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            done.append(f"{name} {Path(what).name}")
            return real(first, *rest)

        monkeypatch.setattr(os, name, noting)

    note("fsync")
    note("rename")
    storage.post_store_path(partial, "uuid")
    renamed = done.index(f"rename {partial.name}")
    assert {"fsync metrics.jsonl", "fsync file"} <= set(done[:renamed])
    assert done[renamed + 1 :] == ["fsync checkpoints"]


def line(step: int) -> str:
    return json.dumps({"group": "training", "steps_completed": step, "metrics": {}}) + "\n"


def test_a_reader_takes_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new_records() == []
    with path.open("w") as file:

        def read_after(text: str) -> list[int]:
            file.write(text)
            file.flush()
            return [record["steps_completed"] for record in reader.new_records()]

        assert read_after(line(1) + line(2)[:10]) == [1]
        assert read_after("") == []
        assert read_after(line(2)[10:]) == [2]
        assert read_after("{damaged\n[]\n{}\n" + line(3)) == [3]
        assert read_after("\n") == []


def test_a_reader_starts_again_where_a_run_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    reader = MetricsReader(path)
    assert len(reader.new_records()) == 3
    path.write_text(line(1))
    assert [record["steps_completed"] for record in reader.new_records()] == [1]
    assert MetricsReader(path, from_end=True).new_records() == []


def test_numbers_that_json_lacks_are_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [math.inf, -math.inf, 0.5]
    append_record(
        path, {"group": "validation", "steps_completed": 1, "metrics": {"a": math.nan, "b": losses}}
    )
    append_record(path, {"group": "training", "steps_completed": 1})
    assert '"NaN"' in path.read_text()
    [record] = read_records(path, "validation")
    assert math.isnan(record["metrics"]["a"])
    assert record["metrics"]["b"] == losses


def test_metrics_become_strict_json(tmp_path: Path) -> None:
    record = {
        "tensor": torch.tensor([1.0, math.nan]),
        "numpy": np.int64(3),
        "nested": {"tuple": (math.inf, -math.inf), 4: None},
        "flag": True,
        "other": torch.device("cpu"),
    }

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    append_record(tmp_path / "metrics.jsonl", record)
    [written] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(written, parse_constant=refuse) == {
        "tensor": [1.0, "NaN"],
        "numpy": 3,
        "nested": {"tuple": ["Infinity", "-Infinity"], "4": None},
        "flag": True,
        "other": "cpu",
    }
