"""``metrics.jsonl`` survives whatever ends a run, and a checkpoint comes after the lines that it counts on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds.documents.writing import write_whole
from determined_ds.protocol.metrics_file import append_line, kept_until
from determined_ds.runtime.local_core import AtomicStorage
from tests.command import ROOT

WRITER = """
import json, sys
from pathlib import Path
from determined_ds.protocol.metrics_file import append_line
step = 0
while True:
    step += 1
    record = {"group": "training", "steps_completed": step, "metrics": {"loss": "x" * 20_000}}
    append_line(Path(sys.argv[1]), json.dumps(record) + "\\n")
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
        append_line(path, json.dumps({"steps_completed": step}) + "\n")
    append_line(path, '{"steps_completed": 1, "metr')
    go_on(path, 2)
    assert steps_in(path) == [1, 2]
    append_line(path, json.dumps({"steps_completed": 3}) + "\n")
    assert steps_in(path) == [1, 2, 3]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_full_disk_takes_nothing_that_was_reported(small_disk: Callable[[int], Path]) -> None:
    path = small_disk(64 * 1024) / "metrics.jsonl"
    record = json.dumps({"steps_completed": 1, "metrics": "x" * 9_000}) + "\n"
    for _ in range(7):
        append_line(path, record)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, record)
    with pytest.raises(OSError, match="No space left"):
        go_on(path, 10)
    assert path.read_text().startswith(record * 7)


def test_metrics_are_on_the_disk_before_a_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    append_line(metrics, "{}\n")
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
