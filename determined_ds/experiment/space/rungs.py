"""The rungs at which Determined's asynchronous halving judges its trials: plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DIVISOR = 4.0
MAX_RUNGS = 5
MODE = "standard"


def brackets(searcher: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of rungs of the searches that run side by side, the largest first.

    ``adaptive_asha`` runs several, ``async_halving`` one.

    Args:
        searcher: The section as written, complete and of the right types.

    Source: ``makeBrackets`` and the modes in determined 0.38.1's ``master/pkg/searcher/adaptive_asha.go``.
    """
    if searcher["name"] == "async_halving":
        return (searcher["num_rungs"],)
    stated = searcher.get("bracket_rungs")
    if stated:
        return tuple(sorted(stated, reverse=True))
    divisor = searcher.get("divisor") or DIVISOR
    most = min(
        searcher.get("max_rungs") or MAX_RUNGS,
        int(math.log(searcher["max_time"]) / math.log(divisor)) + 1,
        int(math.log(searcher["max_trials"]) / math.log(divisor)) + 1,
    )
    fewest = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}
    return tuple(range(most, fewest[searcher.get("mode") or MODE] - 1, -1))


def rungs(searcher: Mapping[str, Any]) -> tuple[int, ...]:
    """When trials are judged, in units of ``time_metric``: in the bracket of most rungs, the lowest first.

    A trial is judged at its first validation at or after a rung, and for all rungs behind it at once.

    Args:
        searcher: As for :func:`brackets`.

    Source: ``makeRungs`` and ``doEarlyStopping`` in determined 0.38.1's ``master/pkg/searcher/asha_stopping.go``.
    """
    count, divisor = brackets(searcher)[0], searcher.get("divisor") or DIVISOR
    return tuple(max(int(searcher["max_time"] / divisor ** (count - 1 - rung)), 1) for rung in range(count))
