"""A start without a code generator, and Muon compiled all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from determined_ds.runtime.upstream import compiled_when_called

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
    assert done.stdout.split()[-2:] == ["False", "True"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """What ``torch.compile`` was asked for; it compiles nothing."""
    asked: list[Callable[..., Any]] = []

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
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
