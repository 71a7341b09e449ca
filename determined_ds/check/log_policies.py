"""Whether a master would restart a trial that no restart can help."""

from __future__ import annotations

import json
import re
from typing import Any

from determined_ds.cluster_log import ERROR, LOG_POLICIES, NO_RESTART_HELPS, OUT_OF_MEMORY
from determined_ds.documents.document import Document
from determined_ds.errors import Problem

# ``max_restarts`` of a YAML that has none, in determined 0.38.1's ``expconf/v0/experiment.json``.
MAX_RESTARTS = 5
MATCHED = (NO_RESTART_HELPS.removeprefix(ERROR), OUT_OF_MEMORY.removeprefix(ERROR))


def missing_policies(document: Document) -> list[Problem]:
    """A warning where a failure that no restart can help would be restarted; its fix has the lines to paste.

    Args:
        document: An experiment.
    """
    allowed = document.get(("max_restarts",))
    allowed = MAX_RESTARTS if allowed is None else allowed
    stated = document.get(("log_policies",))
    policies = stated if isinstance(stated, list) else []
    missing = [
        ours
        for ours, line in zip(LOG_POLICIES, MATCHED, strict=True)
        if not any(_ends_at(policy, line) for policy in policies)
    ]
    if not missing or not isinstance(allowed, int) or allowed < 1:
        return []
    lines = ", ".join(
        f"{{{', '.join(f'{key}: {json.dumps(ours[key])}' for key in ours)}}}" for ours in missing
    )
    return [
        Problem(
            key="log_policies",
            origin=document.origin(("log_policies",)) if policies else "",
            message=f"a failure that no restart can help, e.g. missing data, runs {allowed + 1} times on a cluster",
            fix=f"add log_policies: [{lines}]" if not policies else f"add to it: [{lines}]",
            code="log-policies",
        )
    ]


def _ends_at(policy: Any, line: str) -> bool:
    """Whether a policy cancels restarts at a log line."""
    if not isinstance(policy, dict) or policy.get("action") not in (
        "cancel_retries",
        {"type": "cancel_retries"},
    ):
        return False
    try:
        return re.search(str(policy.get("pattern")), line) is not None
    except re.error:  # Go's syntax differs from Python's
        return False
