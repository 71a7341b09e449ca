"""Files for TensorBoard, and what lies beside them, uploaded to where a cluster stores checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from determined import core, tensorboard
from determined.tensorboard.build import get_sync_path

from determined_ds.checkpoints.files import as_number
from determined_ds.rundir.signals import HEART

logger = logging.getLogger("determined_ds")
# Source: determined 0.38.1, ``TensorboardManager.sync`` passes over an upload within a second of the one before.
BETWEEN_S = 1.0
# The folder beside the files for TensorBoard that the files of ``hyperparameters.logging`` are uploaded from.
OF_TOOLS = "tools"


def upload(context: Any) -> None:
    """Flush the files of a trial's or a session's context; on a cluster, upload them to its storage."""
    if isinstance(context._core.train, core.DummyTrainContext):
        if context.distributed.rank == 0:
            context.get_tensorboard_writer().flush()
        return
    context._maybe_reset_tbd_writer()
    upload_files(context._core.train, context.distributed.rank)


def upload_files(train: Any, rank: int) -> None:
    """Upload what a rank uploads to a cluster's train context: the chief what all write, each its own trace."""
    from determined_ds.profile.record import rank_of_trace

    def is_ours(path: Path) -> bool:
        of_rank = rank_of_trace(path)
        if of_rank is not None:  # ranks of a machine share a folder
            return of_rank == rank
        return rank == 0 or not (path.match("*tfevents*") or OF_TOOLS in path.parts)

    with HEART.patiently():
        train.upload_tensorboard_files(is_ours, tensorboard.util.get_rank_aware_path)


def upload_last(train: Any, upload: Callable[[], None]) -> None:
    """Upload once more at the end: what comes after the last upload would be lost with the container."""
    try:
        since = time.time() - train._tensorboard_manager.last_sync
        time.sleep(max(0.0, min(BETWEEN_S, BETWEEN_S - since)))
        upload()
    except Exception as error:  # what is only shown fails no training
        logger.warning("warning: the last files for TensorBoard were not uploaded: %s", error)


def uploaded_to(info: Any) -> str:
    """Where on a cluster the files of a trial are found, once its container is gone."""
    path = get_sync_path(info.cluster_id, str(info.trial.experiment_id), str(info.trial.trial_id))
    return f"checkpoint_storage: {path}"


def write_scalars(writer: Any, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
    """Write metrics that are numbers to TensorBoard, under the names that they have everywhere: ``training/loss``."""
    for name, value in metrics.items():
        number = as_number(value)
        if number is not None:
            writer.add_scalar(f"{group}/{name}", number, steps_completed)
