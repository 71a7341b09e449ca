"""A terminal for tests: what a program writes, as it stands on the screen. Lines that scroll away are kept."""

from __future__ import annotations

import io
import re

CODES = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])|[^\x1b]")


class Screen(io.TextIOBase):
    """A file that is a terminal.

    Args:
        columns: Wide; a longer line is wrapped.
    """

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self._cells: list[list[str]] = [[]]
        self._row = self._column = 0
        self.written = 0

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += len(text)
        for found in CODES.finditer(text):
            if found.group(3) is None:
                self._put(found.group())
            elif not found.group(1):
                self._control(int(found.group(2).split(";")[0] or 0), found.group(2), found.group(3))
        return len(text)

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self._column = 0
            return
        if sign == "\n" or self._column == self.columns:
            self._row, self._column = self._row + 1, 0
            if self._row == len(self._cells):
                self._cells.append([])
        if sign == "\n":
            return
        line = self._cells[self._row]
        line += " " * (self._column + 1 - len(line))
        line[self._column] = sign
        self._column += 1

    def _control(self, number: int, given: str, code: str) -> None:
        if code == "A":
            self._row = max(0, self._row - max(1, number))
        elif code == "K":
            assert given == "2", given
            self._cells[self._row] = []
        elif code == "J":
            del self._cells[self._row + 1 :]
            del self._cells[self._row][self._column :]
        else:
            assert code in "mhl", f"unknown code {given}{code}"

    @property
    def lines(self) -> list[str]:
        """The lines, those that are gone from the screen too."""
        return ["".join(line).rstrip() for line in self._cells]

    def reflow(self, columns: int) -> None:
        """The user makes it narrower: long lines are wrapped, and the cursor stays at its text."""
        before, self.columns = self._cells, columns
        self._cells = []
        for row, line in enumerate(before):
            if row == self._row:
                at = len(self._cells)
            pieces = [line[start : start + columns] for start in range(0, len(line), columns)]
            self._cells += pieces or [[]]
        self._row = at
