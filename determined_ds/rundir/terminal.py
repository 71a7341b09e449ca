"""Output that outlives its reader: a closed terminal or pipe ends no training."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

GONE = (errno.EPIPE, errno.EIO)


class _Outliving(io.FileIO):
    """A descriptor that leads to ``/dev/null`` once its reader is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(memoryview(data))


def outlive_readers() -> None:
    """From now on, output to stdout and stderr is dropped once their reader is gone."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):  # replaced by a test
        return stream
    stream.flush()
    raw = _Outliving(descriptor, "w", closefd=False)
    by_line = bool(getattr(stream, "line_buffering", True) or getattr(stream, "write_through", False))
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=by_line)
