"""Whether the entrypoint's launcher can carry a trial that is laid out over several machines."""

from __future__ import annotations

import re
from typing import Any

from determined_ds.documents.document import Document
from determined_ds.errors import Problem

DETERMINEDS = "determined.launch.deepspeed"
OURS = "determined_ds.launch.deepspeed"
# Devices of a large machine: a trial with more slots spans machines, as far as can be known before it is there.
LARGE = 8


def launcher_problem(entrypoint: Any, origin: str = "") -> Problem | None:
    """A warning where ranks on other machines would be started by Determined's launcher of DeepSpeed.

    It sends the environment as text through a shell (see :mod:`determined_ds.launch.deepspeed`): values with quotes,
    ``$`` or parentheses are changed or end the launch, and all of them are logged.

    Args:
        entrypoint: Of an experiment that spans machines: a command, or a list of words.
        origin: Where it is stated.
    """
    said = " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint)
    if not re.search(rf"(?<![\w.]){re.escape(DETERMINEDS)}(?![\w.])", said):
        return None
    return Problem(
        key="entrypoint",
        origin=origin,
        message=f"on several machines {DETERMINEDS} changes environment variables that have quotes, $ or "
        "parentheses, or fails, and logs all of them, tokens included",
        fix=f"use determined.launch.torch_distributed or {OURS} in its place",
        code="launcher-machines",
    )


def launcher_problems(document: Document) -> list[Problem]:
    """That warning, for an experiment with more slots than a large machine has.

    Args:
        document: It.
    """
    slots = document.get(("resources", "slots_per_trial"))
    stays = document.get(("resources", "is_single_node")) is True
    if stays or not isinstance(slots, int) or slots <= LARGE:
        return []
    found = launcher_problem(document.get(("entrypoint",)), document.origin(("entrypoint",)))
    return [found] if found else []
