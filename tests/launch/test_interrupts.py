"""Signals of a command that runs many trials: the first ends it in order, the second at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from determined_ds.launch.interrupts import Interrupts


def test_the_first_is_asked_for_the_second_insists(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts("ending the measurement") as interrupts:
        assert (interrupts.requested, interrupts.at_once, interrupts.exit_code) == (False, False, 0)
        os.kill(os.getpid(), signal.SIGINT)
        assert (interrupts.requested, interrupts.at_once, interrupts.exit_code) == (True, False, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupts.requested, interrupts.at_once, interrupts.exit_code) == (True, True, 128 + 15)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capsys.readouterr().err == "\nSIGINT: ending the measurement; again ends at once\n"


def test_a_terminal_that_closes_counts_as_one_but_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    with Interrupts("ending the measurement") as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.signals == [signal.SIGHUP]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts("ending the measurement") as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_of_another_thread_signals_are_none() -> None:
    """They are the main thread's; what runs in another is not disturbed by asking for them."""
    before, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with Interrupts("") as interrupts:
            seen.append((signal.getsignal(signal.SIGINT), interrupts.requested))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
