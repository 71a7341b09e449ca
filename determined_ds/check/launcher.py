"""Whether the entrypoint's launcher can carry a trial that a master lays out over several machines."""

from __future__ import annotations

import re

from determined_ds.config.document import Document
from determined_ds.errors import Problem

DETERMINEDS = "determined.launch.deepspeed"
OURS = "determined_ds.launch.deepspeed"


def launcher_problems(document: Document) -> list[Problem]:
    """A warning where ranks on other machines may be started by Determined's launcher of DeepSpeed.

    It sends the environment as text through a shell (see :mod:`determined_ds.launch.deepspeed`): values with quotes,
    ``$`` or parentheses are changed or end the launch, and all of them are logged.

    Args:
        document: An experiment.
    """
    entrypoint = document.get(("entrypoint",))
    slots = document.get(("resources", "slots_per_trial"))
    stays = document.get(("resources", "is_single_node")) is True
    said = " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint)
    is_named = re.search(rf"(?<![\w.]){re.escape(DETERMINEDS)}(?![\w.])", said)
    if not is_named or stays or not isinstance(slots, int) or slots < 2:
        return []
    return [
        Problem(
            key="entrypoint",
            origin=document.origin(("entrypoint",)),
            message=f"{DETERMINEDS} changes environment variables on their way to other machines, and logs them, "
            "tokens included, where the trial spans machines",
            mend=f"use determined.launch.torch_distributed, or {OURS}, in its place; or state "
            "resources.is_single_node: true",
            code="launcher-machines",
        )
    ]
