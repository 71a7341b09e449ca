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
        message: What the first one begins; printed as it arrives.
    """

    def __init__(self, message: str) -> None:
        self._message = message
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
        if threading.current_thread() is threading.main_thread():  # signals are that thread's
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # nohup: a terminal that closes ends nothing.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        if not self.at_once:
            name = signal.Signals(number).name
            print(f"\n{name}: {self._message}; again ends at once", file=sys.stderr)
