"""A training that is interrupted at any moment and resumed ends, bit for bit, as if it had never stopped.

Parameters, optimizer state, generators, callbacks, unreported metrics, custom reducers and the order of the data: with
dropout, an augmentation that draws random numbers, accumulation and data-loader workers. One table for every form
(trial, plain script with a session, Hugging Face's Trainer), strategy, kind of data and kind of interruption; below it
other storage, and other ranks. On a cluster: ``tests/cluster``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.command import ROOT, det_ds, det_ds_program
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, hf_words, last_words, losses_of
from tests.interrupted.experiments import (
    NUM_BATCHES,
    STRATEGIES,
    experiment,
    hf_experiment,
    run,
    session_experiment,
)
from tests.interrupted.stored import fetched, train
from tests.package import checkpoints, damage


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A row of the table.

    Args:
        config: The experiment.
        ends: How each start ends but the last: ``KILL_AT=PLACE:BATCH``, ``STOP_AT=...``. A checkpoint comes at every
            third batch and after each validation, at every fifth.
        env: Variables of every start.
        changed: Variables of the last start only.
        as_programs: Whether the uninterrupted run, and the last two starts, are programs and not forks.
        long: Why ``make test`` can do without; "" where it cannot.
    """

    config: Mapping[str, Any]
    ends: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    as_programs: bool = False
    long: str = ""


def six_moments(strategy: str) -> tuple[str, ...]:
    """Drawn from a seed: in, before and after a batch, in a validation, in and after a checkpoint."""
    draw = random.Random(strategy)
    points = [f"before:{draw.randint(1, 3)}", f"torn:{draw.choice([3, 6, 9])}"]
    points.append(f"saved:{draw.choice([5, 6, 9, 10, 12, 15])}")
    points.append(f"validating:{draw.choice([5, 10, 15])}")
    points += [f"{draw.choice(['before', 'after'])}:{draw.randint(4, NUM_BATCHES)}" for _ in range(2)]
    return tuple(
        f"KILL_AT={point}" for point in sorted(points, key=lambda point: int(point.partition(":")[2]))
    )


TORN = ("KILL_AT=torn:6", "KILL_AT=validating:10")
# In the middle of an accumulation, at the last batch of a pass, in the validation after it and after that; a pass is
# five batches.
IN_A_PASS = ("KILL_AT=micro:5", "KILL_AT=validating:5", "STOP_AT=micro:8", "KILL_AT=validated:10")
IN_THREE_PASSES = ("KILL_AT=before:5", "KILL_AT=saved:9", "KILL_AT=after:16")
ENOUGH = ("zero3", "dualpipev")
SAME_LOOP = "the same loop and checkpoints as in a case that is short"
BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
SCENARIOS: dict[str, Scenario] = {
    **{
        f"trial, {name}": Scenario(
            config=experiment(**how), ends=TORN, long="" if name in ENOUGH else SAME_LOOP
        )
        for name, how in STRATEGIES.items()
    },
    **{
        f"trial, {name}, six kills": Scenario(
            config=experiment(**how), ends=six_moments(name), as_programs=True, long="more kills, as programs"
        )
        for name, how in STRATEGIES.items()
    },
    "trial, stopped": Scenario(config=experiment(**STRATEGIES["zero2"]), ends=("STOP_AT=after:7",)),
    "trial, rank 1 killed": Scenario(
        config=experiment(**STRATEGIES["zero3"]), ends=("KILL_AT=rank1:8",), long=SAME_LOOP
    ),
    **{
        f"trial, Muon, ZeRO {zero}": Scenario(
            config=experiment(zero=zero, optimizer="Muon"),
            ends=("KILL_AT=after:8",),
            long="" if zero == 3 else SAME_LOOP,
        )
        for zero in range(4)
    },
    **{
        f"trial, Muon, {name}": Scenario(
            config=experiment(optimizer="Muon", **how), ends=("KILL_AT=after:8",), long=SAME_LOOP
        )
        for name, how in {
            "ZeRO 2, bf16": {"zero": 2, "more": BF16},
            "ZeRO 3, offloaded": {"zero": 3, "more": OFFLOADED},
            "interleaved": {"zero": 1, "pipe": 2, "accumulation": 2, "schedule": "interleaved"},
        }.items()
    },
    # Loaders and streams, with two micro-batches to a batch.
    **{
        f"trial, {trial}, {workers} workers": Scenario(
            config=experiment(
                zero=1, trial=trial, accumulation=2, num_workers=workers, pipe=1 + trial.startswith("Pipe")
            ),
            ends=IN_THREE_PASSES,
            long="" if (trial, workers) == ("PipelineStreamVictim", 2) else SAME_LOOP,
        )
        for trial, workers in (
            *(
                (trial, workers)
                for trial in ("TorchVictim", "StreamVictim", "PlacedStreamVictim")
                for workers in (0, 2)
            ),
            ("PipelineStreamVictim", 2),
        )
    },
    # Stages cut by the times of their layers, when other layers take long.
    "trial, stages by times": Scenario(
        config=experiment(zero=1, trial="TimedVictim", pipe=2, accumulation=2),
        ends=("KILL_AT=after:8",),
        env={"SLOW_LAYER": "0"},
        changed={"SLOW_LAYER": "3"},
        long="trial/test_stage_times cuts by times, and a pipeline is short",
    ),
    "session, range": Scenario(
        config=session_experiment("range"), ends=("KILL_AT=validating:5", "STOP_AT=micro:8")
    ),
    "session, four ends": Scenario(config=session_experiment("range"), ends=IN_A_PASS, long=SAME_LOOP),
    "session, epochs": Scenario(
        config=session_experiment("epochs"), ends=("KILL_AT=validated:5", "STOP_AT=micro:10"), long=SAME_LOOP
    ),
    "session, steps": Scenario(config=session_experiment("steps"), ends=("KILL_AT=micro:7",), long=SAME_LOOP),
    **{
        f"session, ZeRO {zero}": Scenario(
            config=session_experiment("range", zero=zero, accumulation=accumulation),
            ends=IN_A_PASS,
            long="trials have every stage, and a session its own loop",
        )
        for zero, accumulation in ((0, 1), (2, 1), (3, 2))
    },
    **{
        f"session, {data}": Scenario(
            config=session_experiment("range"),
            ends=("KILL_AT=micro:5", "STOP_AT=micro:8", "KILL_AT=validated:10"),
            env={"DATA": data},
            long="trials have every kind of data",
        )
        for data in ("stream", "torch")
    },
    "transformers, stopped": Scenario(config=hf_experiment(1), ends=("STOP_AT=after:7",)),
    **{
        f"transformers, ZeRO {zero}": Scenario(
            config=hf_experiment(zero),
            ends=("KILL_AT=after:2", "STOP_AT=after:5", "KILL_AT=torn:9", "KILL_AT=after:10"),
            long="more kills under every ZeRO stage",
        )
        for zero in range(4)
    },
}


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
        key = json.dumps([scenario.config, dict(scenario.env), scenario.as_programs])
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            config = written(scenario, folder)
            start = det_ds_program if scenario.as_programs else det_ds
            done = start("run", config, ROOT, "--run-dir", folder / "run", env=scenario.env)
            assert done.returncode == 0, done.stderr
            known[key] = words_of(scenario, folder / "run")
        return known[key]

    return words


def written(scenario: Scenario, folder: Path) -> Path:
    path = folder / "victim.yaml"
    path.write_text(yaml.safe_dump(dict(scenario.config)))
    return path


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=name, marks=pytest.mark.long(each.long) if each.long else ())
        for name, each in SCENARIOS.items()
    ],
)
def test_it_ends_as_if_it_had_never_stopped(
    scenario: Scenario, whole_of: Callable[[Scenario], dict[str, Any]], tmp_path: Path
) -> None:
    whole, run_dir = whole_of(scenario), tmp_path / "run"
    command: list[str | Path] = ["run", written(scenario, tmp_path), ROOT, "--run-dir", run_dir]
    said = ""
    for number, end in enumerate(scenario.ends):
        how, _, place = end.partition("=")
        is_last = number == len(scenario.ends) - 1
        start = det_ds_program if scenario.as_programs and is_last else det_ds
        ended = start(*command, env={**scenario.env, how: place})
        assert ended.returncode == (1 if how == "KILL_AT" else 0), (end, ended.stdout, ended.stderr)
        if (
            "script.py" not in scenario.config["entrypoint"]
        ):  # it ends by itself when its rank is asked to stop
            status = json.loads((run_dir / "result.json").read_text())["status"]
            assert status == ("failed" if how == "KILL_AT" else "stopped"), end
        command, said = [*command[:5], "--resume"], said + ended.stdout
    start = det_ds_program if scenario.as_programs else det_ds
    resumed = start(*command, env={**scenario.env, **scenario.changed})
    assert resumed.returncode == 0, resumed.stderr
    assert differences(whole, words_of(scenario, run_dir)) == []
    assert ("skipping" in said) == scenario.config["entrypoint"].endswith(":StreamVictim")


def test_torchs_loader_trains_what_determineds_does(whole_of: Callable[[Scenario], dict[str, Any]]) -> None:
    """The same samples in each step and in each validation, in the same order."""
    ours, torchs = (
        whole_of(Scenario(config=experiment(zero=1, trial=trial), ends=()))
        for trial in ("Victim", "TorchVictim")
    )
    assert differences(ours, torchs) == []


# ------------------------------------------------------------------------------------------- other ranks


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(2, 1), (1, 3), (4, 2), (2, 0)], id="2-1-4-2"),
        pytest.param(
            [(1, 1), (2, 3), (1, 0)], id="1-2-1", marks=pytest.mark.long("2-1-4-2 changes both, too")
        ),
    ],
)
def test_on_other_ranks_under_another_stage_it_trains_as_if_nothing_had_changed(
    legs: list[tuple[int, int]], tmp_path: Path
) -> None:
    """A leg is so many slots under a ZeRO stage; each is killed in the middle of a pass, and the next one goes on.

    Sums come in another order on other ranks, so that the last digits may differ.
    """
    config = experiment(zero=1, trial="PlainVictim")
    config["hyperparameters"]["fit"]["reporting_period"] = {"batches": 1}
    path = tmp_path / "victim.yaml"
    path.write_text(yaml.safe_dump(config))
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


# ------------------------------------------------------------------------------------------- other storage


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param("s3", {"pipe": 2}, id="s3, pipeline"),
        pytest.param("gcs", {"zero": 1}, id="gcs, zero1"),
        pytest.param("azure", {"zero": 3}, id="azure, zero3"),
        *(
            pytest.param(kind, {"zero": zero}, id=f"{kind}, zero{zero}", marks=pytest.mark.long(SAME_LOOP))
            for kind, zero in (("s3", 1), ("s3", 3), ("gcs", 3), ("azure", 1))
        ),
    ],
)
def test_from_object_storage_it_ends_as_if_it_had_never_stopped(
    kind: str,
    how: dict[str, Any],
    storage_of: Callable[[str], dict[str, Any]],
    two_ranks: Ranks,
    tmp_path: Path,
) -> None:
    """By Determined's own storage managers: three batches, and from the checkpoint then on; or six at once."""
    storage, whole, parts = storage_of(kind), tmp_path / "whole", tmp_path / "parts"
    [(uuids, said), _] = two_ranks.run(train, whole, storage, 6, **how)
    assert (len(uuids), said) == (2, "")
    expected = fetched(storage, uuids[-1], whole)
    [(uuids, said), _] = two_ranks.run(train, parts, storage, 3, **how)
    assert (len(uuids), said) == (1, "")
    [(uuids, said), _] = two_ranks.run(train, parts, storage, 6, uuids[-1], **how)
    assert (len(uuids), said) == (1, "")
    found = fetched(storage, uuids[-1], parts)
    assert damage(found) is None
    assert checkpoints(parts) == [found]
    assert (found / "metadata.json").read_bytes() == (expected / "metadata.json").read_bytes()
    assert differences(last_words(whole), last_words(parts)) == []
    assert not list((parts / "tmp").iterdir())  # nothing of a checkpoint stays on the machine
