"""Experiments and DeepSpeed JSONs with random mistakes, under every command that decides a configuration."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.campaigns.case import Case
from tests.check.mutants import mutant
from tests.command import ROOT

# Where a mutant is fine, `--test` of an impossible accelerator is never reached: nothing here starts a rank.
COMMANDS = ("check", "render", "estimate")


def mutated_files(count: int, draw: random.Random, folder: Path) -> Iterator[Case]:
    """Break a file of a copy of the templates, and have it read by three commands."""
    for name in ("experiments", "model_defs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    good_files = sorted([*(ROOT / "experiments").rglob("*.yaml"), *(ROOT / "experiments").rglob("*.json")])
    for _ in range(count):
        good, seed = draw.choice(good_files), draw.randrange(2**31)
        broken = folder / good.relative_to(ROOT)
        broken.write_bytes(mutant(good, seed))
        failures = []
        for command in COMMANDS:
            words = [command, str(broken)] if command == "check" else [command, str(broken), str(folder)]
            result = CliRunner().invoke(main, words)
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                failures.append(f"{command}: {result.exception!r}")
            elif result.exit_code not in (0, 1, 2):
                failures.append(f"{command}: exit code {result.exit_code}")
        shutil.copy(good, broken)
        yield Case(name=f"{good.relative_to(ROOT)} {seed}", failures=failures)
