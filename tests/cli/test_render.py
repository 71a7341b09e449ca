"""``det-ds render``: the very mapping that a run gives DeepSpeed, each value with where it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from tests.command import ROOT

EXPERIMENTS = sorted(path.relative_to(ROOT) for path in ROOT.glob("experiments/gpt2/*.yaml"))
LR = "hyperparameters.learning_rate=0.25"


@pytest.fixture(autouse=True)
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def render(*arguments: str | Path, colour: bool = False) -> Result:
    return CliRunner().invoke(main, ["render", *map(str, arguments)], color=colour)


def rendered(*arguments: str | Path) -> dict[str, Any]:
    """What ``--json`` gives."""
    result: dict[str, Any] = json.loads(render(*arguments, "--json").stdout)
    return result


def mapping_in(text: str) -> dict[str, Any]:
    """The text form without its comments."""
    lines = [line.partition("  #")[0] for line in text.splitlines() if not line.startswith("#")]
    plain: dict[str, Any] = json.loads("\n".join(lines))
    return plain


@pytest.mark.parametrize("config", EXPERIMENTS, ids=lambda path: path.stem)
def test_it_is_what_a_run_gives_deepspeed(config: Path, tmp_path: Path) -> None:
    if config.stem == "zeropp":  # for GPUs only
        assert render(config, "--accelerator", "cpu").exit_code == 2
        return
    run = prepare_run(RunOptions(config=config, overrides=(LR,), run_dir=tmp_path / "run", accelerator="cpu"))
    asked = (config, "--accelerator", "cpu", "--set", LR)
    assert rendered(*asked) == run.resolved.ds_config
    assert mapping_in(render(*asked).stdout) == run.resolved.ds_config


def test_origins_name_the_place() -> None:
    result = render("experiments/gpt2/const.yaml", "--accelerator", "cuda", "--slots", 4, "--set", LR)
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
    result = render("experiments/gpt2/search.yaml", "--accelerator", "cpu")
    head = result.stdout.splitlines()[1]
    assert head.startswith("# one point of a search over ")
    assert "learning_rate" in head
    assert mapping_in(result.stdout)["optimizer"]["params"]["lr"] == pytest.approx(10**-2.75)


def test_colours_are_for_terminals() -> None:
    asked = ("experiments/gpt2/const.yaml", "--accelerator", "cpu")
    assert "\x1b[" not in render(*asked).output
    assert "\x1b[" in render(*asked, colour=True).output
    assert "\x1b[" not in render(*asked, "--json", colour=True).output


def test_a_warning_does_not_disturb_the_mapping(own_model: Path) -> None:
    asked = (own_model / "experiment.yaml", own_model, "--accelerator", "cpu", "--set", LR, "--json")
    result = render(*asked)  # the DeepSpeed JSON states another learning rate
    assert (result.exit_code, json.loads(result.stdout)["optimizer"]["params"]["lr"]) == (0, 0.01)
    assert result.stderr.startswith("warning: hyperparameters.learning_rate = 0.25 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "error: nothing.yaml: no such file"),
        (["experiments/gpt2/const.yaml", "--slots", "3"], "is not a multiple of data_parallel_world_size"),
        (["experiments/deepspeed/zero1.json"], "is a DeepSpeed JSON, not an experiment"),
    ],
)
def test_what_cannot_run_has_no_mapping(arguments: list[str], message: str) -> None:
    result = render(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_value_by_another_name_says_which() -> None:
    micro_batch, stages = "hyperparameters.micro_batch_size=4", "hyperparameters.pp_size=1"
    result = render("experiments/gpt2/const.yaml", "--set", micro_batch, "--set", stages)
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if '"train_micro_batch_size_per_gpu"' in line)
    assert line.split() == ['"train_micro_batch_size_per_gpu":', "4,", "#", "--set", micro_batch]
    assert f"hyperparameters.pp_size = 1 (--set {stages}): is taken as pipe_parallel_size" in result.stderr


def test_which_rank_stands_where() -> None:
    pipeline = ("experiments/gpt2/pipeline.yaml", "--slots", 4, "--ranks", "--slots-per-machine", 2)
    within = ("--set", "hyperparameters.pipe_within_machine=true")
    assert render(*pipeline).stdout.splitlines() == [
        "machine 0   pipe 0 data 0 | pipe 0 data 1",
        "machine 1   pipe 1 data 0 | pipe 1 data 1",
    ]
    assert render(*pipeline, *within).stdout.splitlines() == [
        "machine 0   pipe 0 data 0 | pipe 1 data 0",
        "machine 1   pipe 0 data 1 | pipe 1 data 1",
    ]
    places = json.loads(render(*pipeline, *within, "--json").stdout)
    assert places[2] == {
        "rank": 2,
        "machine": 1,
        "slot": 0,
        "data": 1,
        "pipe": 0,
        "sequence": 0,
        "model": 0,
    }
    assert "# machine 0   pipe 0 data 0 | " in render("experiments/gpt2/pipeline.yaml", "--slots", 4).stdout
