"""What decides and what shows loads no torch, and every public name is there when it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import determined_ds

HEAVY = {"torch", "deepspeed", "determined", "transformers"}
DRAWING = {"matplotlib", "numpy"}


def python(code: str, *words: str | Path) -> list[str]:
    """The words that a fresh Python prints at its end."""
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    "code",
    [
        "import determined_ds",
        "import determined_ds.errors",
        "import determined_ds.cli.main",
        "import determined_ds as d; d.reconcile, d.ConfigError, d.load_experiment, d.ResolvedConfig, d.Results",
        "import determined_ds as d; d.load_deepspeed_config, d.load_results",
    ],
)
def test_a_name_that_decides_or_shows_loads_nothing_heavy(code: str) -> None:
    assert not (HEAVY | DRAWING) & set(python(f"{code}; import sys; print(*sys.modules)"))


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
        ("--help", 0),
        ("run --help", 0),
        ("run experiments/gpt2/const.yaml . --slots 3 --accelerator cpu", 2),
        ("check experiments/gpt2/const.yaml .", 0),
        ("check experiments/gpt2/search.yaml .", 0),
        ("search --help", 0),
        ("search experiments/gpt2/search.yaml . --accelerator tpu", 2),
        ("compare --help", 0),
        ("autotune --help", 0),
        ("report --help", 0),
        ("watch no/such/run", 2),
        ("checkpoint show no/such/run", 2),
        ("doctor --help", 0),
    ],
)
def test_an_answer_without_a_run_loads_nothing_heavy(command: str, code: int) -> None:
    exit_code, *loaded = python(INVOKED, *command.split())
    assert exit_code == str(code)
    assert not (HEAVY | {"matplotlib"}) & set(loaded)


def test_what_draws_loads_no_torch_and_never_pyplot(tmp_path: Path) -> None:
    code = """
import sys
from tests.package import write_report
from tests.report.making import results, row
assert write_report(results(row()), sys.argv[1])
print("drawn", *sys.modules)
"""
    assert not (HEAVY | {"matplotlib.pyplot"}) & set(python(code, tmp_path))


OPTIMIZED = """
import sys, torch
from determined_ds import open_context
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.5)

def step():
    optimizer.zero_grad()
    (weight ** 2).sum().backward()
    optimizer.step()

step()
loaded = "torch._dynamo.config" in sys.modules
torch.compile(step, backend="eager")()
weight.sum().backward()
print(loaded, "torch._dynamo.config" in sys.modules, weight.tolist())
"""


def test_the_compiler_of_torch_is_loaded_once_something_is_compiled() -> None:
    assert python(OPTIMIZED) == ["False", "True", "[0.0,", "0.0]"]


def test_every_public_name_resolves_and_no_other() -> None:
    code = "import determined_ds as d; print(*(n for n in d.__all__ if getattr(d, n).__name__ == n))"
    assert python(code) == determined_ds.__all__
    assert set(determined_ds.__all__) <= set(dir(determined_ds))
    with pytest.raises(AttributeError, match="DataParallelTrail"):
        determined_ds.DataParallelTrail


def test_a_type_checker_sees_the_names_that_run_time_resolves() -> None:
    assert determined_ds.__file__
    tree = ast.parse(Path(determined_ds.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    seen = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == determined_ds.__all__
