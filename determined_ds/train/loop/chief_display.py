"""Which display a rank has: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT
from determined_ds.train.loop.progress import LogLines, Progress


def make_progress(is_chief: bool, records: Path | None = None, *, closes: bool | None = None) -> Progress:
    """The display for this rank's kind of output.

    Args:
        is_chief: Whether this is rank 0; the others show nothing.
        records: ``metrics.jsonl`` of the run, where there is one.
        closes: As of :class:`LogLines`; if None, it goes by who has launched this process.
    """
    if not is_chief:
        return Progress()
    if closes is None:
        closes = PARENT not in os.environ and LAUNCHED_BY not in os.environ
    if not shows_panel():
        return LogLines(closes=closes)
    from determined_ds.train.loop.live_panel import LivePanel  # loads rich

    return LivePanel(records, closes=closes)


def shows_panel() -> bool:
    """Whether this process writes to a terminal that a panel can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
