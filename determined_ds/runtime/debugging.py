"""``debug: true``: a rank logs whatever it, Determined and DeepSpeed have to say, and where it stands."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator

from determined import common

STACKS_EVERY_S = 30


@contextlib.contextmanager
def debugging(enabled: bool) -> Iterator[None]:
    """Log at level DEBUG, and dump every thread's stack to stderr now and then, as Determined's harness does.

    Source: ``maybe_periodic_stacktraces`` and ``set_logger`` in determined 0.38.1's ``exec/harness.py``.

    Args:
        enabled: What the experiment says of ``debug``.
    """
    if not enabled:
        yield
        return
    common.set_logger(True)
    faulthandler.dump_traceback_later(STACKS_EVERY_S, repeat=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
