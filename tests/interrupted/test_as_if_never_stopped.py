"""A training that is interrupted at any moment and resumed ends, bit for bit, as if it had never stopped.

Parameters, optimizer state, generators, callbacks, unreported metrics, custom reducers and the order of the data: with
dropout, an augmentation that draws random numbers, accumulation and data-loader workers. One table for every form
(trial, plain script with a session, Hugging Face's Trainer), strategy, kind of data and kind of interruption; below it
other storage, other ranks and other schedules. On a cluster: ``tests/cluster``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.checkpoints.strategies import ZERO, hyperparameters, trial_class
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, hf_words, last_words, losses_of
from tests.interrupted.experiments import STRATEGIES, experiment, hf_experiment, run, session_experiment
from tests.interrupted.stored import fetched, train
from tests.package import checkpoints, damage
from tests.train.small import fit


class Scenario(NamedTuple):
    """A row of the table: the experiment, and how each start ends but the last, as ``KILL_AT=PLACE:BATCH``.

    A checkpoint comes at every third batch and after each validation, at every fifth.
    """

    config: Mapping[str, Any]
    ends: tuple[str, ...]
    env: Mapping[str, str] = {}


IN_A_PASS = ("KILL_AT=validating:5", "STOP_AT=micro:8", "KILL_AT=validated:10")
IN_THREE_PASSES = ("KILL_AT=before:5", "KILL_AT=after:16")
BF16_OFFLOADED = {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
MUON: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"zero": 3},
    "ZeRO 2, bf16, offloaded": {"zero": 2, "more": BF16_OFFLOADED},
    "interleaved": {"zero": 1, "pipe": 2, "accumulation": 2, "schedule": "interleaved"},
}
# Trials by their loaders and streams, in three passes; two micro-batches to a batch, or four of a pipeline.
PIPED = {"pipe": 2, "accumulation": 4, "schedule": "dualpipev"}
DATA: dict[str, dict[str, Any]] = {
    "TorchVictim": {"num_workers": 2, "accumulation": 2},
    "StreamVictim": {"num_workers": 2, "accumulation": 2},
    "PipelineStreamVictim": {"num_workers": 2, **PIPED},
}
SCENARIOS: dict[str, Scenario] = {
    **{
        f"trial, {name}": Scenario(experiment(**how), ("KILL_AT=torn:6", "KILL_AT=validating:10"))
        for name, how in STRATEGIES.items()
    },
    "trial, stopped, and rank 1 killed": Scenario(
        experiment(**STRATEGIES["zero2"]), ("STOP_AT=after:7", "KILL_AT=rank1:13")
    ),
    **{
        f"trial, Muon, {name}": Scenario(experiment(optimizer="Muon", **how), ("KILL_AT=after:8",))
        for name, how in MUON.items()
    },
    **{
        f"trial, {trial}": Scenario(experiment(zero=1, trial=trial, **how), IN_THREE_PASSES)
        for trial, how in DATA.items()
    },
    # In the validation after a pass of five, in the middle of an accumulation, and after a validation.
    "session, range": Scenario(session_experiment("range"), IN_A_PASS[:2]),
    "session, epochs": Scenario(session_experiment("epochs"), ("KILL_AT=validated:5", "STOP_AT=micro:10")),
    "session, steps": Scenario(session_experiment("steps"), ("KILL_AT=micro:7",)),
    "session, ZeRO 3": Scenario(session_experiment("range", zero=3), IN_A_PASS),
    "session, stream": Scenario(session_experiment("range"), IN_A_PASS, env={"DATA": "stream"}),
    "session, torch": Scenario(session_experiment("range", accumulation=1), IN_A_PASS, env={"DATA": "torch"}),
    "transformers, stopped": Scenario(hf_experiment(1), ("STOP_AT=after:7",)),
    "transformers, ZeRO 3": Scenario(
        hf_experiment(3), ("KILL_AT=after:2", "STOP_AT=after:5", "KILL_AT=torn:9", "KILL_AT=after:10")
    ),
}
SHORT = ("trial, zero3", "trial, PipelineStreamVictim", "session, range", "transformers, stopped")
LONG = pytest.mark.long("the same loop and checkpoints as in a case that is short")


def stage_of(scenario: Scenario) -> int:
    return int(scenario.config["hyperparameters"]["deepspeed_config"]["val"]["zero_optimization"]["stage"])


def words_of(scenario: Scenario, run_dir: Path) -> dict[str, Any]:
    """What a run of a scenario ends with: also what its script has written, for a session."""
    if "hf_script" in scenario.config["entrypoint"]:
        return hf_words(run_dir)
    own = {file.name: json.loads(file.read_text()) for file in run_dir.glob("words*.json")}
    return {**last_words(run_dir), "own": own}


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], dict[str, Any]]:
    """``whole_of(scenario)``: what its training ends with if nothing interrupts it."""
    known: dict[str, dict[str, Any]] = {}

    def words(scenario: Scenario) -> dict[str, Any]:
        key = json.dumps([scenario.config, scenario.env])
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            done = run(written(scenario.config, folder), folder / "run", **scenario.env)
            assert done.returncode == 0, done.stderr
            known[key] = words_of(scenario, folder / "run")
        return known[key]

    return words


def written(config: Mapping[str, Any], folder: Path) -> Path:
    path = folder / "victim.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else LONG) for name in SCENARIOS]
)
def test_it_ends_as_if_it_had_never_stopped(
    name: str, whole_of: Callable[[Scenario], dict[str, Any]], tmp_path: Path
) -> None:
    scenario = SCENARIOS[name]
    whole, run_dir, config = whole_of(scenario), tmp_path / "run", written(scenario.config, tmp_path)
    for number, end in enumerate(scenario.ends):
        how, _, place = end.partition("=")
        resume = ["--resume"] if number else []
        ended = run(config, run_dir, *resume, **{**scenario.env, how: place})
        assert ended.returncode == (1 if how == "KILL_AT" else 0), (end, ended.stdout, ended.stderr)
        status = json.loads((run_dir / "result.json").read_text())["status"]
        # A session's pass may be its last one when its rank is asked to stop.
        assert status in ("failed" if how == "KILL_AT" else "stopped", "completed"), end
        if status == "stopped":
            closing = ended.stdout.partition("stopped, ")[2]
            assert "  resume      det-ds run " in closing, ended.stdout
            assert f"ZeRO {stage_of(scenario)}" in closing, ended.stdout
    resumed = run(config, run_dir, "--resume", **scenario.env)
    assert resumed.returncode == 0, resumed.stderr
    assert differences(whole, words_of(scenario, run_dir)) == []


# ------------------------------------------------------------------------------------------- other ranks, other storage


def test_on_other_ranks_under_another_stage_it_trains_as_if_nothing_had_changed(tmp_path: Path) -> None:
    """A leg is so many slots under a ZeRO stage; each is killed in the middle of a pass, and the next one goes on.

    Sums come in another order on other ranks, so that the last digits may differ.
    """
    legs = [(2, 1), (1, 3), (4, 0)]
    config = experiment(zero=1, trial="PlainVictim")
    config["hyperparameters"]["fit"]["reporting_period"] = {"batches": 1}
    path = written(config, tmp_path)
    whole = run(path, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    stage = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage"
    for number, (slots, zero) in enumerate(legs):
        is_last = number == len(legs) - 1
        options = ["--slots", str(slots), "--set", f"{stage}={zero}", *(["--resume"] if number else [])]
        kill = {} if is_last else {"KILL_AT": f"after:{4 * (number + 1)}"}
        done = run(path, tmp_path / "run", *options, **kill)
        assert done.returncode == (0 if is_last else 1), done.stderr
    expected, found = (losses_of(tmp_path / name) for name in ("whole", "run"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "run/result.json").read_text())["slots"] == legs[-1][0]


def train_under(run_dir: Path, schedule: str, steps: int, resume: str | None = None) -> str:
    """Train in this rank, with a report of each batch and four to a validation. Returns the newest checkpoint."""
    periods: dict[str, Any] = {"reporting_period": ("batches", 1), "validation_period": ("batches", 4)}
    how = {**periods, "checkpoint_policy": "none", "latest_checkpoint": resume}
    hparams = hyperparameters(ZERO[schedule])
    fit(run_dir, trial_class(ZERO[schedule]), hparams=hparams, max_length=("batches", steps), **how)
    return checkpoints(run_dir)[0].name


def test_under_other_schedules_it_trains_as_if_nothing_had_changed(two_ranks: Ranks, tmp_path: Path) -> None:
    """Four batches under each: optimizer states and the position in the data follow the layers, not the rank."""
    way = ["dualpipev_zero1", "pipe2_zero1", "interleaved4"]  # every change of what ranks hold
    two_ranks.run(train_under, tmp_path / "whole", "pipe2_zero1", 4 * len(way))
    uuid = None
    for number, schedule in enumerate(way):
        uuid, *_ = two_ranks.run(train_under, tmp_path / "run", schedule, 4 * (number + 1), uuid)
    whole, found = losses_of(tmp_path / "whole"), losses_of(tmp_path / "run")
    assert len(whole) == 5 * len(way)
    assert found == pytest.approx(whole, rel=1e-5)


def test_from_object_storage_it_ends_as_if_it_had_never_stopped(
    storage: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    """By Determined's own storage manager: three batches, and from the checkpoint then on; or six at once."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def trained(run_dir: Path, batches: int, latest: str | None = None) -> str:
        [(uuids, said), _] = two_ranks.run(train, run_dir, storage, batches, latest, pipe=2)
        assert (len(uuids), said) == (2 if batches == 6 and latest is None else 1, "")
        return str(uuids[-1])

    fetched(storage, trained(whole, 6), whole)
    found = fetched(storage, trained(parts, 6, trained(parts, 3)), parts)
    assert damage(found) is None
    assert differences(last_words(whole), last_words(parts)) == []
    assert not list((parts / "tmp").iterdir())  # nothing of a checkpoint stays on the machine
