"""A traceback begins at the author's own line; an ``exit`` in the author's code is a failure with a place."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.tracebacks import (
    AuthorsFiles,
    authors_traceback,
    exit_of_author,
    os_exit_reported,
    show_own_errors,
    trimmed_traceback,
)

SOURCE = """
import json, os, sys

def helper():
    raise ValueError("in the helper")

def fails():
    helper()

def fails_in_library():
    json.loads("{")

def fails_from():
    try:
        helper()
    except ValueError as error:
        raise KeyError("afterwards") from error

def deep(depth=0):
    deep(depth + 1)

def exits(code):
    sys.exit(code)

def exits_hard():
    os._exit(0)

def calls_back(function):
    function()

class Data:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        helper()
"""


@pytest.fixture
def author(tmp_path: Path) -> ModuleType:
    """A module of the author's in a context directory."""
    file = tmp_path / "trial.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("authors_trial", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def traceback_of(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("it did not fail")


def places(text: str) -> list[str]:
    """``file:function`` of each frame."""
    lines = [line.split(", ") for line in text.splitlines() if line.lstrip().startswith("File ")]
    return [f"{Path(file.split(chr(34))[1]).name}:{where.removeprefix('in ')}" for file, _, where in lines]


def test_frames_above_the_authors_are_left_out(author: ModuleType, tmp_path: Path) -> None:
    files = AuthorsFiles(tmp_path)
    assert places(authors_traceback(traceback_of(author.fails), files)) == [
        "trial.py:fails",
        "trial.py:helper",
    ]


def test_frames_below_them_stay(author: ModuleType, tmp_path: Path) -> None:
    """A library that the author called; and what is called back by the author's code."""
    files = AuthorsFiles(tmp_path)
    found = places(authors_traceback(traceback_of(author.fails_in_library), files))
    assert found[0] == "trial.py:fails_in_library"
    assert found[-1] == "decoder.py:raw_decode"
    found = places(authors_traceback(traceback_of(author.calls_back, author.fails), files))
    assert found == ["trial.py:calls_back", "trial.py:fails", "trial.py:helper"]


def test_the_error_that_one_came_of_begins_there_too(author: ModuleType, tmp_path: Path) -> None:
    text = authors_traceback(traceback_of(author.fails_from), AuthorsFiles(tmp_path))
    assert places(text) == ["trial.py:fails_from", "trial.py:helper", "trial.py:fails_from"]
    assert "ValueError: in the helper" in text
    assert "direct cause" in text
    assert text.endswith("KeyError: 'afterwards'\n")


def test_a_repeated_frame_is_one(author: ModuleType, tmp_path: Path) -> None:
    text = authors_traceback(traceback_of(author.deep), AuthorsFiles(tmp_path))
    assert "[Previous line repeated" in text
    assert places(text)[0] == "trial.py:deep"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_data_begins_in_the_dataset(
    author: ModuleType, tmp_path: Path, num_workers: int
) -> None:
    """A worker's error quotes the traceback of another process."""
    loader = torch.utils.data.DataLoader(author.Data(), num_workers=num_workers)
    text = authors_traceback(traceback_of(next, iter(loader)), AuthorsFiles(tmp_path))
    assert places(text) == ["trial.py:__getitem__", "trial.py:helper"]
    assert "ValueError: in the helper" in text


def test_what_is_not_the_authors_stays_whole(tmp_path: Path) -> None:
    text = traceback_of(int, "x")
    assert authors_traceback(text, AuthorsFiles(tmp_path)) == text


def test_the_library_and_installed_packages_are_not_the_authors(tmp_path: Path) -> None:
    """Also where the context directory holds them."""
    root = Path(__file__).resolve().parents[2]
    files = AuthorsFiles(root)
    assert str(root / "model_defs/gpt2/trial.py") in files
    assert "model_defs/gpt2/trial.py" in files
    assert str(root / "determined_ds/train.py") not in files
    assert str(root / ".venv/lib/python3.11/site-packages/torch/__init__.py") not in files
    assert "<string>" not in files
    assert str(tmp_path / "trial.py") not in files


def test_the_whole_of_it_is_kept(author: ModuleType, tmp_path: Path) -> None:
    keep = tmp_path / "logs" / "traceback-rank0.txt"
    try:
        author.fails()
    except ValueError as error:
        text = trimmed_traceback(error, AuthorsFiles(tmp_path), keep)
    assert text.rstrip().endswith(f"full traceback: {keep}")
    assert places(keep.read_text())[0] == "test_tracebacks.py:test_the_whole_of_it_is_kept"


# ------------------------------------------------------------------------------------------- exits


@pytest.mark.parametrize("code", [7, 0, None, "no data"])
def test_an_exit_is_named_with_its_place(author: ModuleType, tmp_path: Path, code: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        author.exits(code)
    said = exit_of_author(raised.value, AuthorsFiles(tmp_path))
    assert said is not None
    assert f"exit({code!r}) at trial.py:23, in exits" in said
    assert "fix: " in said


def test_an_exit_of_a_library_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        raise SystemExit(0)
    assert exit_of_author(raised.value, AuthorsFiles(tmp_path)) is None


def exit_hard(function: Callable[[], None], folder: Path) -> int:
    """The exit code of a fork that calls ``os._exit`` where that is told; what it says is in ``said``."""
    pid = os.fork()
    if pid == 0:

        def say(message: str, exit_code: int) -> None:
            (folder / "said").write_text(f"{exit_code} {message}")

        with os_exit_reported(AuthorsFiles(folder), say):
            function()
        os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_hard_exit_of_the_authors_is_a_failure(author: ModuleType, tmp_path: Path) -> None:
    """Whatever its code is: else a run that was cut off would be taken as complete."""
    assert exit_hard(author.exits_hard, tmp_path) == 1
    said = (tmp_path / "said").read_text()
    assert said.startswith("1 the trial called os._exit(0) at trial.py:26, in exits_hard")


def test_other_hard_exits_are_what_they_are(author: ModuleType, tmp_path: Path) -> None:
    """Of a library, and of a process that the author's code has forked."""

    def forks() -> None:
        pid = os.fork()
        if pid == 0:
            author.exits_hard()
        os._exit(5 + os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    assert exit_hard(forks, tmp_path) == 5
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize(("rank", "is_shown"), [("0", True), ("1", False)])
def test_a_script_ends_with_the_message_alone(
    rank: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has shown a configuration's mistake; anything else keeps its traceback."""
    said, codes, others = io.StringIO(), [], []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "__stderr__", said)
    monkeypatch.setattr(sys, "excepthook", lambda *given: others.append(given[0]))
    monkeypatch.setattr(os, "_exit", codes.append)
    show_own_errors()
    wrong = ConfigError(Problem(key="a", value=1, message="must be 2", fix="write 2"))
    sys.excepthook(ConfigError, wrong, None)
    sys.excepthook(ValueError, ValueError(), None)
    assert said.getvalue() == ("error: a = 1: must be 2\n  fix: write 2\n" if is_shown else "")
    assert (codes, others) == ([2], [ValueError])
