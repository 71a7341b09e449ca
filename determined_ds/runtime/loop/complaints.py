"""Errors after training, in a validation or a report: all ranks raise them, once the weights are saved."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from determined_ds.errors import ChiefFailed, DeterminedDSError, NotFiniteError
from determined_ds.protocol.heartbeat import HEART
from determined_ds.runtime.checkpoints.trial_state import TrialState
from determined_ds.runtime.master.crashes import exit_code_of

logger = logging.getLogger("determined_ds")

T = TypeVar("T")
# How long ranks wait for each other; one that has no complaint is held in a collective, and never comes.
AGREE_S = 10.0


def as_chief(distributed: Any, step: Callable[[], T]) -> T:
    """What a step returns on the chief, or the error that it ends in there, on all ranks; a collective.

    Args:
        distributed: The ranks.
        step: Taken by the chief alone.
    """
    result, error, told = None, None, None
    if distributed.rank == 0:
        try:
            with HEART.patiently():
                result = step()
        except Exception as caught:
            error = caught
            told = error if isinstance(error, DeterminedDSError) else _of_the_chief(error)
    result, told = distributed.broadcast((result, told))
    if told is not None:
        raise error or told
    return result  # type: ignore[no-any-return]


def _of_the_chief(error: Exception) -> ChiefFailed:
    told = ChiefFailed(f"rank 0: {error!r}")
    told.exit_code = exit_code_of(error)
    return told


def all_ranks_come(name: str, *, within_s: float) -> bool:
    """Whether every rank calls this with the same name in time: no collective, which a rank that failed never joins.

    Args:
        name: Of the meeting, another one each time.
        within_s: How long to wait for the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    deadline = time.monotonic() + within_s
    while (come := store.add(name, 0)) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(come >= dist.get_world_size())


@contextlib.contextmanager
def saved_before_complaint(distributed: Any, state: TrialState, save: Callable[[], None]) -> Iterator[None]:
    """Write a checkpoint before an error is raised, where all ranks have one: then all can take part in it.

    Args:
        distributed: The ranks.
        state: Where training stands.
        save: Writes the checkpoint; a collective.
    """
    try:
        yield
    except NotFiniteError:
        raise
    except Exception:
        batch = state.batches_trained
        if state.last_checkpoint != batch and all_ranks_come(f"complaint/{batch}", within_s=AGREE_S):
            try:
                save()
            except Exception as error:
                if distributed.rank == 0:
                    logger.warning("warning: no checkpoint was written before it: %s", error)
        raise
