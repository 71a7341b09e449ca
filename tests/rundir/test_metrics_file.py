"""What was reported is on the disk before a checkpoint is: a resumed run has no gap in its metrics."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from determined_ds.rundir.metrics_file import append_record
from determined_ds.train.local_core import AtomicStorage


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
    storage.publish("uuid", {"steps_completed": 1})
    renamed = done.index(f"rename {partial.name}")
    assert {"fsync metrics.jsonl", "fsync file"} <= set(done[:renamed])
    assert done[renamed + 1 :] == ["fsync checkpoints"]
