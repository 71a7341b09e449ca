"""Whether a master would restart a trial that no restart can help."""

from __future__ import annotations

import json
import re
from typing import Any

from determined_ds.cluster_log import ERROR, LOG_POLICIES, NO_RESTART_HELPS, OUT_OF_MEMORY
from determined_ds.documents.document import Document
from determined_ds.errors import Problem

MATCHED = (NO_RESTART_HELPS.removeprefix(ERROR), OUT_OF_MEMORY.removeprefix(ERROR))


def missing_policies(document: Document) -> list[Problem]:
    """What is good to know of an experiment that asks for restarts; its fix has the lines to paste.

    One that states no ``max_restarts`` is left alone: it is a first draft, and costs minutes at worst.

    Args:
        document: An experiment.
    """
    allowed, stated = document.get(("max_restarts",)), document.get(("log_policies",))
    policies = stated if isinstance(stated, list) else []
    missing = [
        f"{{{', '.join(f'{key}: {json.dumps(value)}' for key, value in ours.items())}}}"
        for ours, line in zip(LOG_POLICIES, MATCHED, strict=True)
        if not any(_ends_at(policy, line) for policy in policies)
    ]
    if not missing or not isinstance(allowed, int) or allowed < 1:
        return []
    return [
        Problem(
            key="log_policies",
            origin=document.origin(("log_policies" if policies else "max_restarts",)),
            message=f"a failure that no restart can help, e.g. missing data, runs {allowed + 1} times on a cluster",
            fix=f"add {'to it' if policies else 'log_policies'}: [{', '.join(missing)}]",
            code="log-policies",
        )
    ]


def _ends_at(policy: Any, line: str) -> bool:
    """Whether a policy cancels restarts at a log line."""
    cancels = ("cancel_retries", {"type": "cancel_retries"})
    if not isinstance(policy, dict) or policy.get("action") not in cancels:
        return False
    try:
        return re.search(str(policy.get("pattern")), line) is not None
    except re.error:  # Go's syntax differs from Python's
        return False
