"""Has a master list the checkpoints as deleted that were deleted at the end of a run that is reported to it."""

from __future__ import annotations

import getpass
import sys
import threading
from collections.abc import Sequence
from unittest import mock

# A run has ended: how long it waits for a master.
WAIT_S = 30.0


def report_deleted(uuids: Sequence[str], *, wait_s: float = WAIT_S) -> None:
    """Have the master that ``DET_MASTER`` names list checkpoints as deleted; where that fails, warn.

    Args:
        uuids: Of the checkpoints.
        wait_s: Seconds, at most.
    """
    failed: list[str] = []

    def report() -> None:
        try:
            _report(uuids)
        except Exception as error:  # of the client, the network, the master
            failed.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=report, name="deleted-in-master", daemon=True)
    thread.start()
    thread.join(wait_s)
    if thread.is_alive():
        failed.append(f"no answer within {wait_s:.0f} s")
    for why in failed[:1]:
        print(f"warning: the master still lists the deleted checkpoints: {why}", file=sys.stderr, flush=True)


def _report(uuids: Sequence[str]) -> None:
    """Source: ``CheckpointContext._report_checkpoint_deleted`` in determined 0.38.1's ``core/_checkpoint.py``."""
    from determined.common.api import bindings
    from determined.experimental import Determined

    with mock.patch.object(getpass, "getpass", _refuse_to_ask):
        client = Determined()
    nothing = bindings.PatchCheckpointOptionalResources(resources={})
    deleted = [bindings.v1PatchCheckpoint(uuid=uuid, resources=nothing) for uuid in uuids]
    bindings.patch_PatchCheckpoints(
        client._session, body=bindings.v1PatchCheckpointsRequest(checkpoints=deleted)
    )


def _refuse_to_ask(*_: object) -> str:
    raise PermissionError("not logged in: run `det user login`, or set DET_USER and DET_PASS")
