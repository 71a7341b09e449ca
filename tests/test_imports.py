"""`import determined_ds` costs nothing, and every public name is there when it is asked for."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import determined_ds
import determined_ds.check
import determined_ds.checkpoint
import determined_ds.config
import determined_ds.documents
import determined_ds.experiment
import determined_ds.memory
import determined_ds.report
import determined_ds.scaffold

HEAVY = {"torch", "deepspeed", "determined", "transformers", "numpy"}
ROOMS = (
    determined_ds.documents,
    determined_ds.config,
    determined_ds.experiment,
    determined_ds.memory,
    determined_ds.check,
    determined_ds.checkpoint,
    determined_ds.report,
    determined_ds.scaffold,
)
PURE = [module.name for room in ROOMS for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]


def python(code: str) -> str:
    """What a fresh Python prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        ["determined_ds"],
        ["determined_ds.errors"],
        PURE,
        ["determined_ds.devices"],
        ["determined_ds.cli.main"],
    ],
    ids=["determined_ds", "errors", "pure", "devices", "cli"],
)
def test_nothing_heavy_is_loaded(modules: list[str]) -> None:
    assert modules
    loaded = python(f"import sys, {', '.join(modules)}; print(*sys.modules)").split()
    assert set(modules) <= set(loaded)
    assert not HEAVY & set(loaded)


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "run --help",
        "run experiments/gpt2/const.yaml . --slots 3 --accelerator cpu",
        "estimate --params 6B --gpu-memory 80GiB",
        "search --help",
        "search experiments/gpt2/search.yaml . --accelerator cpu --machine-slots 0",
    ],
)
def test_an_answer_without_a_run_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from determined_ds.cli.main import main;"
        f"done = CliRunner().invoke(main, {command.split()}); print(done.exit_code, *sys.modules)"
    )
    exit_code, *loaded = python(code).split()
    assert exit_code == ("2" if command.endswith((" 0", " cpu")) else "0")
    assert not (HEAVY | {"optuna", "matplotlib"}) & set(loaded)


def test_a_pure_name_stays_light() -> None:
    """Asking the package for a name of the pure rooms loads that room only."""
    loaded = python("import sys, determined_ds as d; d.reconcile, d.ConfigError; print(*sys.modules)").split()
    assert not HEAVY & set(loaded)


def test_every_public_name_resolves() -> None:
    code = "import determined_ds as d; print(*(n for n in d.__all__ if getattr(d, n).__name__ == n))"
    assert python(code).split()[-len(determined_ds.__all__) :] == determined_ds.__all__


def test_dir_lists_every_public_name() -> None:
    assert set(determined_ds.__all__) <= set(dir(determined_ds))
    assert dir(determined_ds) == sorted(set(dir(determined_ds)))


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DataParallelTrail"):
        determined_ds.DataParallelTrail


def test_a_type_checker_sees_the_names_that_run_time_resolves() -> None:
    assert determined_ds.__file__
    tree = ast.parse(Path(determined_ds.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    seen: dict[str, str | None] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        seen |= {alias.asname or alias.name: node.module for alias in node.names}
    assert seen == determined_ds._HOMES
    assert determined_ds.__all__ == sorted(seen)
