"""Files for TensorBoard, and what lies beside them, uploaded to where a cluster stores checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from determined import core, tensorboard
from determined.tensorboard.build import get_sync_path

from determined_ds.checkpoints.retention import as_number
from determined_ds.profile.record import rank_of_trace
from determined_ds.rundir.heartbeat import HEART

logger = logging.getLogger("determined_ds")
# Source: determined 0.38.1, ``TensorboardManager.sync`` passes over an upload within a second of the one before.
BETWEEN_S = 1.0
# The folder beside the files for TensorBoard that the files of ``hyperparameters.logging`` are uploaded from.
OF_TOOLS = "tools"
# Storage -> what its address begins with, and the keys of its place.
PLACES = {
    "shared_fs": ("", ("host_path", "storage_path")),
    "directory": ("", ("container_path",)),
    "s3": ("s3://", ("bucket", "prefix")),
    "gcs": ("gs://", ("bucket", "prefix")),
    "azure": ("azure://", ("container",)),
}


def upload(context: Any) -> None:
    """Flush the files of a trial or a session; on a cluster, upload them to its storage.

    Args:
        context: Of this rank.
    """
    if isinstance(context._core.train, core.DummyTrainContext):
        if context.distributed.rank == 0:
            context.get_tensorboard_writer().flush()
        return
    context._maybe_reset_tbd_writer()
    upload_files(context._core.train, context.distributed.rank)


def upload_files(train: Any, rank: int) -> None:
    """Upload what a rank uploads: the chief what all write, each its own trace.

    Args:
        train: Determined's train context, on a cluster.
        rank: Its number.
    """

    def is_ours(path: Path) -> bool:
        of_rank = rank_of_trace(path)
        if of_rank is not None:  # ranks of a machine share a folder
            return of_rank == rank
        return rank == 0 or not (path.match("*tfevents*") or OF_TOOLS in path.parts)

    with HEART.patiently():
        train.upload_tensorboard_files(is_ours, tensorboard.util.get_rank_aware_path)


def upload_last(train: Any, upload: Callable[[], None]) -> None:
    """Upload once more at the end: what comes after the last upload would be lost with the container.

    Args:
        train: Determined's train context, on a cluster.
        upload: Uploads.
    """
    try:
        since = time.time() - train._tensorboard_manager.last_sync
        time.sleep(max(0.0, min(BETWEEN_S, BETWEEN_S - since)))
        upload()
    except Exception as error:  # what is only shown fails no training
        logger.warning("warning: the last files for TensorBoard were not uploaded: %s", error)


def upload_too(train: Any, folder: Path) -> None:
    """From now on upload the files of a folder too, with those for TensorBoard.

    They are copied there before each upload: Determined fails where a file vanishes while it looks for those to
    upload, and clients of tools make and remove files at any time.

    Args:
        train: Determined's train context, on a cluster.
        folder: Where the files are written.
    """
    manager = train._tensorboard_manager
    sync = manager.sync

    def sync_with_folder(*given: Any, **options: Any) -> None:
        if time.time() - manager.last_sync >= BETWEEN_S:
            copy_changed(folder, manager.base_path / OF_TOOLS)
        sync(*given, **options)

    manager.sync = sync_with_folder


def copy_changed(source: Path, target: Path) -> None:
    """Copy the files of a folder that are newer than their copies; one that vanishes meanwhile is left out.

    Args:
        source: The folder; links to files are copied as files.
        target: Where the copies are.
    """
    for folder, _, names in os.walk(source):
        for name in names:
            file = Path(folder) / name
            copy = target / file.relative_to(source)
            with contextlib.suppress(FileNotFoundError):
                if file.is_file() and not (copy.exists() and copy.stat().st_mtime > file.stat().st_mtime):
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)


def uploaded_to(info: Any) -> str:
    """Where on a cluster the files of a trial are found, once its container is gone.

    Args:
        info: Determined's information about the trial.
    """
    storage: Mapping[str, Any] = info.trial._config.get("checkpoint_storage") or {}
    begin, keys = PLACES.get(str(storage.get("type")), ("checkpoint_storage: ", ()))
    parts = [str(storage[key]).strip("/" if begin else "") for key in keys if storage.get(key)]
    place = posixpath.join(*parts) if parts else ""  # an absolute storage_path stands alone
    path = get_sync_path(info.cluster_id, str(info.trial.experiment_id), str(info.trial.trial_id))
    return f"{begin}{place}/{path}" if place else f"{begin}{path}"


def write_scalars(writer: Any, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
    """Write the metrics that are numbers to TensorBoard, under the names that they have everywhere: ``training/loss``.

    Args:
        writer: Has ``add_scalar(name, value, step)``.
        group: ``training`` or ``validation``.
        steps_completed: Batches trained.
        metrics: As they were reported.
    """
    for name, value in metrics.items():
        number = as_number(value)
        if number is not None:
            writer.add_scalar(f"{group}/{name}", number, steps_completed)
