"""Determined's core context on a cluster, patient with a master that fails for a while."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from determined import core
from determined.common.api import errors

# As Determined's own, which tries a call again where the connection fails, and also where the master answers that it
# cannot now: then five times, in 15 seconds. Whoever sets DET_RETRY_CONFIG decides instead.
RETRIES = {
    "total": 20,
    "status": 5,
    "status_forcelist": [500, 502, 503, 504],
    "backoff_factor": 0.5,
    "allowed_methods": False,
}


@contextlib.contextmanager
def cluster_core_context(distributed: core.DistributedContext) -> Iterator[core.Context]:
    """Open the core context of a trial on a cluster.

    Args:
        distributed: The ranks.
    """
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(RETRIES))
    with core.init(
        distributed=distributed,
        preempt_mode=core.PreemptMode.ChiefOnly,
        tensorboard_mode=core.TensorboardMode.MANUAL,
    ) as context:
        _take_for_reported_what_is(context.checkpoint)
        yield context


def _take_for_reported_what_is(checkpoints: Any) -> None:
    """Where the answer to a checkpoint's report is lost, the report is made again, and the master refuses it.

    Such a checkpoint is reported for all that. This stands in Determined's own method, since its ranks may
    wait for each other after the report.
    """
    report = getattr(checkpoints, "_report_checkpoint", None)
    if report is None:
        return

    def report_once(storage_id: str, *args: Any, **kwargs: Any) -> None:
        try:
            report(storage_id, *args, **kwargs)
        except errors.BadRequestException:
            if not checkpoints.get_metadata(storage_id):
                raise

    checkpoints._report_checkpoint = report_once
