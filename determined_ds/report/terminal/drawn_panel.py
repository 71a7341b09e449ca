"""The panel on a terminal: drawn in place by rich, whatever else is printed above it."""

from __future__ import annotations

import math
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from determined_ds.report.terminal.panel import panel_text, signs_for
from determined_ds.report.terminal.run_state import RunState


class OpenConsole(Console):
    """A terminal whose cursor stays visible, also where the process is killed while the panel is on it."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class DrawnPanel:
    """The panel while it is on the terminal; nothing of it is left at its end.

    Args:
        console: The terminal; that of this process if None.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or OpenConsole(highlight=False)
        self.state = RunState()
        self._signs = signs_for(self.console.encoding)
        self._live = Live(
            get_renderable=self._draw,
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # one that goes to a file goes there still
            vertical_overflow="crop",
        )
        self._drawn: Group | None = None
        self._columns = 0

    @property
    def is_shown(self) -> bool:
        """Whether it is on the terminal."""
        return self._live.is_started

    def start(self) -> None:
        """Show it; from now on what is printed to ``sys.stdout`` and ``sys.stderr`` stands above it."""
        self._live.start()
        self.refresh()

    def refresh(self) -> None:
        """Draw it anew."""
        self._fit_columns()
        self._live.refresh()

    def stop(self) -> None:
        """Remove it."""
        self._fit_columns()
        self._live.stop()

    def note(self, text: str) -> None:
        """Print a line above it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def clear_below(self, lines: int) -> None:
        """Remove what another process has written below it, so many lines."""
        self.console.file.write(f"\r\x1b[{lines}A\x1b[J")

    def _draw(self) -> Group:
        self._drawn = panel_text(self.state, columns=self.console.width, now=time.time(), signs=self._signs)
        return self._drawn

    def _fit_columns(self) -> None:
        """Where the terminal has become narrower, it has wrapped the lines: as many are to be cleared."""
        columns, before = self.console.width, self._columns
        self._columns = columns
        if columns >= before or self._drawn is None:
            return
        lengths = [len(line) for line in self._drawn.renderables if isinstance(line, Text)]
        height = sum(max(1, math.ceil(length / columns)) for length in lengths)
        self._live._live_render._shape = (columns, height)
