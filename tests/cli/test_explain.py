"""``det-ds check --explain``: the exact mapping that a run gives DeepSpeed, with the source of each value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from tests.harness.command import ROOT

CONST, SEARCH = "experiments/gpt2/const.yaml", "experiments/gpt2/search.yaml"
LR = ("--set", "hyperparameters.learning_rate=0.25")


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def check(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def test_it_is_what_a_run_gives_deepspeed(trained: Path) -> None:
    """As JSON, and as text without its comments."""
    given, folder = json.loads((trained / "run/deepspeed_config.json").read_text()), trained / "own_model"
    words = (folder / "experiment.yaml", folder, "--accelerator", "cpu", "--explain")
    lines = [line.partition("  #")[0] for line in check(*words).stdout.splitlines() if line[0] != "#"]
    assert json.loads("\n".join(lines)) == json.loads(check(*words, "--json").stdout) == given
    assert (given["train_batch_size"], given["train_micro_batch_size_per_gpu"]) == (8, 4)
    assert "auto" not in json.dumps(given)


def test_origins_name_the_place() -> None:
    head, *lines = check(CONST, "--explain", "--slots", 4, *LR).stdout.splitlines()
    assert head == "# gpt2_const: 4 slots on cuda"
    split = [line.partition("  # ") for line in lines]
    origins = {value.strip().rstrip(","): origin for value, _, origin in split}
    assert origins['"lr": 0.25'] == f"learning_rate, {' '.join(LR)}"
    assert origins['"train_batch_size": 32'].startswith(f"global_batch_size, {CONST}:")
    assert origins['"train_micro_batch_size_per_gpu": 8'].startswith("derived: global_batch_size 32 / (")
    assert origins['"stage": 1'].startswith("experiments/deepspeed/zero1.json:")
    assert origins['"enabled": true'] == "the accelerator: cuda"


def test_a_search_is_explained_by_its_middle_point() -> None:
    given = json.loads(check(SEARCH, "--explain", "--json").stdout)
    assert given["optimizer"]["params"]["lr"] == pytest.approx(10**-2.75)
