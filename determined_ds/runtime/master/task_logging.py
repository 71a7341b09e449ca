"""What a rank of a cluster logs: warnings with their level, and nothing of what says nothing."""

from __future__ import annotations

import logging
import os

import determined as det

from determined_ds.devices import detect_accelerator
from determined_ds.task_log import lines_of


class WithLevel(logging.Formatter):
    """Determined's form; of ours, each line begins with the level, and a problem is one line."""

    def __init__(self) -> None:
        super().__init__(det.LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        if record.name.partition(".")[0] != "determined_ds":
            return super().format(record)
        return "\n".join(lines_of(f"{record.levelname}: ", record.getMessage()))


def log_in_task(accelerator: str | None) -> None:
    """From now on log as the task's log is read, before DeepSpeed is loaded.

    DeepSpeed warns on each rank where it finds no GPU, unless it is told what to compute on.

    Args:
        accelerator: ``cpu``, ``cuda``, or None for the best there is.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(WithLevel())
    logging.getLogger().addHandler(handler)
    os.environ["DS_ACCELERATOR"] = detect_accelerator(accelerator).name
