"""What is uploaded with the files for TensorBoard on a cluster, by Determined's own manager of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from determined.tensorboard.shared import SharedFSTensorboardManager

from determined_ds.runtime.tensorboard_files import (
    copy_changed,
    upload_files,
    upload_last,
    upload_too,
    uploaded_to,
)

SYNC_PATH = Path("cluster/tensorboard/experiment/1/trial/2")


class Train:
    """Determined's train context, as far as it uploads."""

    def __init__(self, folder: Path) -> None:
        self.events, self.stored = folder / "events", folder / "storage" / SYNC_PATH
        self.events.mkdir(parents=True)
        self._tensorboard_manager = SharedFSTensorboardManager(
            str(folder / "storage"), self.events, SYNC_PATH, async_upload=False
        )

    def upload_tensorboard_files(self, selector: Any, mangler: Any) -> None:
        self._tensorboard_manager.sync(selector, mangler, 0)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    return Train(tmp_path)


@pytest.fixture
def of_tools(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    return tmp_path / "tools"


def test_the_last_upload_has_what_came_within_a_second_of_the_one_before(train: Train) -> None:
    """Determined passes over such an upload, and says nothing."""
    file = train.events / "notes.txt"
    file.write_text("first")
    upload_files(train, 0)
    file.write_text("last")
    upload_files(train, 0)
    assert (train.stored / "notes.txt").read_text() == "first"
    started = time.monotonic()
    upload_last(train, lambda: upload_files(train, 0))
    assert (train.stored / "notes.txt").read_text() == "last"
    assert time.monotonic() - started < 10, "it waits for a second"


def test_an_upload_that_fails_at_the_end_is_a_warning(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    def upload() -> None:
        raise OSError("no room")

    upload_last(train, upload)
    assert "the last files for TensorBoard were not uploaded: no room" in caplog.text


def test_files_of_tools_are_uploaded_whatever_their_clients_do_there(train: Train, of_tools: Path) -> None:
    """A client has made a link to a file that is not there yet, which fails Determined's look at its own folder."""
    (of_tools / "metrics.csv").write_text("batches,time\n")
    (of_tools / "latest.log").symlink_to(of_tools / "later.log")
    upload_too(train, of_tools)
    upload_files(train, 0)
    assert [path.name for path in train.stored.rglob("*") if path.is_file()] == ["metrics.csv"]
    (train.events / "latest.log").symlink_to(of_tools / "later.log")
    with pytest.raises(FileNotFoundError):
        train._tensorboard_manager._sync()


def test_of_the_tools_only_what_has_changed_is_copied(tmp_path: Path, of_tools: Path) -> None:
    target = tmp_path / "copies"
    for name in ("same", "grows"):
        (of_tools / name).write_text(name)
    copy_changed(of_tools, target)
    copied = (target / "same").stat().st_mtime_ns
    (of_tools / "grows").write_text("grown")
    later = time.time() + 5
    os.utime(of_tools / "grows", (later, later))
    copy_changed(of_tools, target)
    assert (target / "grows").read_text() == "grown"
    assert (target / "same").stat().st_mtime_ns == copied


def test_other_ranks_upload_their_trace_and_what_a_trial_writes(train: Train) -> None:
    for name in ("tools/metrics.csv", "events.out.tfevents.1", "profile/rank0.pt.trace.json.gz", "image.txt"):
        (train.events / name).parent.mkdir(exist_ok=True)
        (train.events / name).write_text(name)
    (train.events / "profile/rank1.pt.trace.json.gz").write_text("its own")
    upload_files(train, 1)
    found = {str(path.relative_to(train.stored)) for path in train.stored.rglob("*") if path.is_file()}
    assert {name.split("#")[0] for name in found} == {"profile/rank1", "image.txt"}


@pytest.mark.parametrize(
    ("storage", "place"),
    [
        ({"type": "shared_fs", "host_path": "/mnt/det"}, "/mnt/det"),
        ({"type": "shared_fs", "host_path": "/mnt/det", "storage_path": "team"}, "/mnt/det/team"),
        ({"type": "shared_fs", "host_path": "/mnt/det", "storage_path": "/mnt/det/team"}, "/mnt/det/team"),
        ({"type": "directory", "container_path": "/data"}, "/data"),
        ({"type": "s3", "bucket": "b", "prefix": "/p/"}, "s3://b/p"),
        ({"type": "gcs", "bucket": "b"}, "gs://b"),
        ({"type": "azure", "container": "c"}, "azure://c"),
    ],
)
def test_where_people_find_them(storage: dict[str, str], place: str) -> None:
    trial = SimpleNamespace(experiment_id=1, trial_id=2, _config={"checkpoint_storage": storage})
    assert uploaded_to(SimpleNamespace(cluster_id="cluster", trial=trial)) == f"{place}/{SYNC_PATH}"
