"""Good files damaged at random: never a traceback, never a hang, always the place and a fix."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings

from determined_ds.check.inputs import check_files
from determined_ds.check.output import place
from tests.check.mutants import mutant
from tests.command import ROOT

NUM_MUTANTS = 6 * settings().max_examples
HANGS_AFTER_S = 30  # a guard against hangs, not a measure
GOOD = [
    *sorted((ROOT / "experiments" / "gpt2").glob("*.yaml")),
    *sorted((ROOT / "experiments" / "deepspeed").glob("*.json")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context directory to damage a file in."""
    folder = tmp_path_factory.mktemp("context")
    for name in ("experiments", "model_defs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"still checking after {HANGS_AFTER_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS_AFTER_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seed", range(NUM_MUTANTS))
def test_whatever_stands_in_it(folder: Path, seed: int) -> None:
    good = GOOD[seed % len(GOOD)]
    damaged = folder / good.relative_to(ROOT)
    content = mutant(good, seed)
    damaged.write_bytes(content)
    try:
        # A JSON by itself, and in an experiment; an experiment by itself.
        files = [damaged]
        if good.suffix == ".json":
            files.append(folder / "experiments" / "gpt2" / f"{good.stem}.yaml")
        reports = check_files(files, context_dir=folder)
    finally:
        shutil.copy(good, damaged)
    for report in reports:
        for finding in report.findings:
            assert finding.problem.message
            assert finding.problem.fix, finding
            where, line, column = place(finding, report.file)
            text = content if Path(where) == damaged else Path(where).read_bytes()
            assert 1 <= line <= text.count(b"\n") + 1, (finding, line)
            assert column >= 1
