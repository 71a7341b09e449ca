"""A bar of bytes on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

PROGRESS_FROM = 2**28  # bytes


@contextlib.contextmanager
def byte_bar(num_bytes: int, name: str, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal where there is much to read; gives the function that counts bytes."""
    if hidden or num_bytes < PROGRESS_FROM or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        *(progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn()),
        *(progress.TransferSpeedColumn(), progress.TimeRemainingColumn()),
    )
    console = Console(stderr=True)
    with progress.Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(name, total=num_bytes)
        yield lambda count: bar.advance(task, count)
