"""What decides and what shows loads no torch, and every public name is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import determined_ds

HEAVY = {"torch", "deepspeed", "determined", "transformers"}
DRAWING = {"matplotlib", "numpy"}


def python(code: str, *words: str) -> list[str]:
    """The words that a fresh Python prints at its end."""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_a_name_that_decides_or_shows_loads_nothing_heavy() -> None:
    names = (
        "d.reconcile, d.ConfigError, d.load_experiment, d.ResolvedConfig, d.Results, d.load_deepspeed_config"
    )
    code = f"import determined_ds as d; {names}, d.load_results; import determined_ds.cli.main, sys"
    assert not (HEAVY | DRAWING) & set(python(f"{code}; print(*sys.modules)"))


INVOKED = """
import sys
from click.testing import CliRunner
from determined_ds.cli.main import main
done = CliRunner().invoke(main, sys.argv[1:])
print(done.exit_code, *sys.modules)
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run experiments/gpt2/const.yaml . --slots 3 --accelerator cpu", 2),
        ("check experiments/gpt2/search.yaml .", 0),
        ("search experiments/gpt2/search.yaml . --accelerator tpu", 2),
        ("watch no/such/run", 2),
        ("checkpoint show no/such/run", 2),
        ("doctor --help", 0),
    ],
)
def test_an_answer_without_a_run_loads_nothing_heavy(command: str, code: int) -> None:
    exit_code, *loaded = python(INVOKED, *command.split())
    assert exit_code == str(code)
    assert not (HEAVY | {"matplotlib"}) & set(loaded)


def test_every_public_name_resolves_and_no_other() -> None:
    code = "import determined_ds as d; print(*(n for n in d.__all__ if getattr(d, n).__name__ == n))"
    assert python(code) == determined_ds.__all__
    assert set(determined_ds.__all__) <= set(dir(determined_ds))
    with pytest.raises(AttributeError, match="DataParallelTrail"):
        determined_ds.DataParallelTrail
