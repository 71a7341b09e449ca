"""``det-ds watch --page``: its options, and the program from its start to Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.report.recorded import course, recorded
from tests.report.test_page import Page


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(main, ["watch", *map(str, words)])


def test_it_prints_its_address_and_ends_cleanly(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", course(10))
    words = [sys.executable, "-m", "determined_ds.cli", "watch", str(run), "--page"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        url, _, said = program.stdout.readline().partition("  ")
        assert said == "(Ctrl-C ends it)\n"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert "gpt2" in Page(answer.read().decode()).texts["title"]
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=30)
    assert (program.returncode, out, err) == (0, "no longer served; the run continues\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "8888"), "add it"),
        (("--open",), "add it"),
        ((".",), "one run is shown"),
    ],
)
def test_what_needs_the_page_says_so(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = invoke(recorded(tmp_path / "run", course(10)), *words)
    assert done.exit_code == EXIT_CONFIG
    assert said in done.output


def test_a_folder_without_a_run_is_an_error_with_a_fix(tmp_path: Path) -> None:
    done = invoke(tmp_path, "--page")
    assert done.exit_code == EXIT_CONFIG
    assert "holds no run" in done.stderr
    assert "fix: " in done.stderr
