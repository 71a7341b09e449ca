"""``det-ds check --explain``: the very mapping that a run gives DeepSpeed, each value with where it came from.

And what ``det-ds check`` by itself says of a run below its verdict.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from tests.harness.command import ROOT

LR = "hyperparameters.learning_rate=0.25"


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def explain(*arguments: str | Path) -> Result:
    return check(*arguments, "--explain")


def explained(*arguments: str | Path) -> dict[str, Any]:
    """What ``--json`` gives."""
    result: dict[str, Any] = json.loads(explain(*arguments, "--json").stdout)
    return result


def mapping_in(text: str) -> Any:
    """The text form without its comments."""
    lines = [line.partition("  #")[0] for line in text.splitlines() if not line.startswith("#")]
    return json.loads("\n".join(lines))


def test_it_is_what_a_run_gives_deepspeed(trained: Path) -> None:
    """As text without its comments, too."""
    asked = (trained / "own_model/experiment.yaml", trained / "own_model", "--accelerator", "cpu")
    given = json.loads((trained / "run/deepspeed_config.json").read_text())
    assert explained(*asked) == given
    assert mapping_in(explain(*asked).stdout) == given
    assert (given["train_batch_size"], given["train_micro_batch_size_per_gpu"]) == (8, 4)
    assert "auto" not in json.dumps(given)


def test_origins_name_the_place() -> None:
    result = explain("experiments/gpt2/const.yaml", "--accelerator", "cuda", "--slots", 4, "--set", LR)
    origins = {}
    for line in result.stdout.splitlines():
        value, _, origin = line.partition("  # ")
        origins[value.strip().rstrip(",").rstrip()] = origin
    assert origins['"lr": 0.25'] == f"learning_rate, --set {LR}"
    assert origins['"train_batch_size": 32'].startswith("global_batch_size, experiments/gpt2/const.yaml:")
    assert origins['"train_micro_batch_size_per_gpu": 8'].startswith("derived: global_batch_size 32 / (")
    assert origins['"stage": 1'].startswith("experiments/deepspeed/zero1.json:")
    assert origins['"enabled": true'] == "the accelerator: cuda"
    assert result.stdout.startswith("# gpt2_const: 4 slots on cuda\n")


def test_of_a_search_it_is_the_point_in_the_middle() -> None:
    result = explain("experiments/gpt2/search.yaml", "--accelerator", "cpu")
    head = result.stdout.splitlines()[1]
    assert head.startswith("# one point of a search over ")
    assert "learning_rate" in head
    assert mapping_in(result.stdout)["optimizer"]["params"]["lr"] == pytest.approx(10**-2.75)


def test_a_warning_does_not_disturb_the_mapping(own_model: Path) -> None:
    asked = (own_model / "experiment.yaml", own_model, "--accelerator", "cpu", "--set", LR, "--json")
    result = explain(*asked)  # the DeepSpeed JSON states another learning rate
    assert (result.exit_code, json.loads(result.stdout)["optimizer"]["params"]["lr"]) == (0, 0.01)
    assert ": warning: hyperparameters.learning_rate = 0.25 (--set " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "nothing.yaml:1:1: error: no such file"),
        (["experiments/gpt2/const.yaml", "--slots", "3"], "is not a multiple of data_parallel_world_size"),
        (["experiments/deepspeed/zero1.json"], "is not an experiment of determined_ds"),
        (["experiments/gpt2/const.yaml", "experiments/gpt2/zero3.yaml"], "takes one experiment, not 2 files"),
    ],
)
def test_what_cannot_run_has_no_mapping(arguments: list[str], message: str) -> None:
    result = explain(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_which_rank_stands_where() -> None:
    pipeline = ("experiments/gpt2/pipeline.yaml", "--slots", 4, "--ranks", "--slots-per-machine", 2)
    within = ("--set", "hyperparameters.pipe_within_machine=true")
    assert check(*pipeline).stdout.splitlines() == [
        "machine 0   pipe 0 data 0 | pipe 0 data 1",
        "machine 1   pipe 1 data 0 | pipe 1 data 1",
    ]
    assert check(*pipeline, *within).stdout.splitlines() == [
        "machine 0   pipe 0 data 0 | pipe 1 data 0",
        "machine 1   pipe 0 data 1 | pipe 1 data 1",
    ]
    places = json.loads(check(*pipeline, *within, "--json").stdout)
    shared = {"sequence": 0, "model": 0}
    assert places[2] == {"rank": 2, "machine": 1, "slot": 0, "data": 1, "pipe": 0, **shared}
    assert "# machine 0   pipe 0 data 0 | " in explain("experiments/gpt2/pipeline.yaml", "--slots", 4).stdout


def test_a_check_says_what_will_run_and_what_it_takes() -> None:
    said = check("experiments/gpt2/const.yaml", "--set", "hyperparameters.micro_batch_size=4").stdout
    verdict, runs, takes = said.splitlines()
    assert verdict == "1 file checked, nothing to fix"
    assert runs == "runs on 2 slots of cuda: ZeRO 1, bf16, 2 replicas x micro-batch 4 x 4 accumulation"
    assert takes.startswith("takes 200 batches of 32 samples; ")
    *_, runs, takes = check("experiments/gpt2/search.yaml").stdout.splitlines()
    assert runs.startswith("one point of the search runs on 2 slots of cuda: ")
    assert takes.startswith("takes 200 batches of 32 samples for each of up to 16 trials; ")


def test_an_earlier_name_says_what_it_is_now() -> None:
    result = CliRunner().invoke(main, ["render", "experiments/gpt2/const.yaml"])
    assert result.exit_code == 2
    assert "det-ds render is now: det-ds check CONFIG --explain" in result.stderr
