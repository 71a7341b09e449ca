"""Ranks for the tests that need them (see ``ranks.py``), and what their runs reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.ranks import Ranks

# How long an example takes says nothing of whether it is right.
hypothesis.settings.register_profile("without a clock", deadline=None)
hypothesis.settings.load_profile("without a clock")


def _ranks(size: int, factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(size, factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A rank alone: a process of its own, since joining a process group changes the process that does."""
    yield from _ranks(1, tmp_path_factory)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, started once a session."""
    yield from _ranks(2, tmp_path_factory)


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[Path, str], list[dict[str, Any]]]:
    """``metrics_of(run_dir, "training")``: the reports of a group in ``metrics.jsonl``, in order."""

    def read(run_dir: Path, group: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line["metrics"] for line in lines if line["group"] == group]

    return read
