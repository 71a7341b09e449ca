"""SIGINT, SIGTERM and SIGHUP of a command that runs trials: the first stops it in good order, the second at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Counts the signals while it is entered.

    Args:
        message: What the first one begins.
        announced: Whether it is printed as the signal arrives; else by :meth:`announce`.
    """

    def __init__(self, message: str, *, announced: bool = True) -> None:
        self._message = message
        self._announced = announced
        self._before: dict[int, Any] = {}
        self.signals: list[int] = []

    @property
    def requested(self) -> bool:
        """Whether to end in order."""
        return bool(self.signals)

    @property
    def at_once(self) -> bool:
        """Whether to end without waiting."""
        return len(self.signals) > 1

    @property
    def exit_code(self) -> int:
        """0 after the first; 128 + its number after the second."""
        return 128 + self.signals[-1] if self.at_once else 0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: a terminal that closes ends nothing
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        if self.signals == [number] and self._announced:
            self.announce()

    def announce(self) -> None:
        """Print the first signal and what it begins."""
        name = signal.Signals(self.signals[0]).name
        print(f"\n{name}: {self._message}; again ends at once", file=sys.stderr)
