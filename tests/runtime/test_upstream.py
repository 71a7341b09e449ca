"""How Determined, DeepSpeed and torch are loaded in a rank, and what they log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from determined_ds.errors import Problem
from determined_ds.runtime.upstream import WithLevel, compiled_when_called
from tests.command import ROOT

START = """
import sys
from determined_ds.devices import detect_accelerator
from determined_ds.runtime.group.distributed import join_process_group
join_process_group(detect_accelerator("cpu"))
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
print("torch._inductor.compile_fx" in sys.modules, hasattr(original_muon.muon_update, "__wrapped__"))
"""


def test_a_rank_that_has_started_has_loaded_no_code_generator() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", START]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["False", "False"]  # on a CPU it is not compiled


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """What ``torch.compile`` was asked for; it compiles nothing."""
    asked: list[Callable[..., Any]] = []

    def compile_(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert not dynamic
        asked.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    return asked


def double(number: int) -> int:
    """Of a number."""
    return 2 * number


def test_it_is_compiled_once_and_at_the_first_call(compiled: list[Callable[..., Any]]) -> None:
    late = compiled_when_called(double)
    assert compiled == []
    assert [late(2), late(number=3)] == [4, 6]
    assert compiled == [double]
    assert late.__doc__ == double.__doc__


def test_within_what_is_compiled_it_is_a_part_of_that(
    compiled: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert compiled_when_called(double)(2) == 4
    assert compiled == []


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
