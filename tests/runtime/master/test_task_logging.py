"""What a rank of a cluster logs: lines with their level, none of DeepSpeed's that say nothing."""

from __future__ import annotations

import logging
import subprocess
import sys

from determined_ds.errors import Problem
from determined_ds.runtime.upstream import WithLevel
from tests.command import ROOT

PROBLEM = Problem(key="gradient_clipping", value=0, message="clips nothing", fix="remove it")


def line(name: str, message: object) -> str:
    return WithLevel().format(logging.LogRecord(name, logging.WARNING, "", 0, "%s", (message,), None))


def test_a_warning_of_ours_is_a_line_of_its_level() -> None:
    assert line("determined_ds", PROBLEM) == "WARNING: gradient_clipping = 0: clips nothing; fix: remove it"
    assert line("determined_ds", "warning: slow") == "WARNING: slow"


def test_others_have_determineds_form() -> None:
    said = line("determined.core", "a")
    assert said.startswith("WARNING: [")
    assert said.endswith("] determined.core: a")


def test_deepspeed_loads_without_a_word() -> None:
    """It warns where nobody says what to compute on, and it finds no GPU."""
    script = (
        "from determined_ds.runtime.upstream import log_in_task; log_in_task('cpu');"
        "import logging, determined_ds.runtime.context;"
        "logging.getLogger('determined_ds').warning('the last')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "WARNING: the last\n")
