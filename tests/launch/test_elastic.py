"""`--elastic MIN:MAX`: as many ranks as there are, and fewer once one is lost for good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.errors import EXIT_CONFIG, EXIT_CRASHED, ConfigError
from determined_ds.launch import prepare
from determined_ds.launch.external.placement import Placement
from determined_ds.launch.fewer_ranks import VISIBLE, without_rank
from determined_ds.launch.local_run import LocalRun
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from determined_ds.launch.ranks.hang import Hang
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.launch.restarting import Restarts
from determined_ds.protocol.checkpoint_files import Checkpoint, write_manifest
from determined_ds.protocol.conclusion import CRASH
from determined_ds.protocol.tensor_index import EngineIndex, write_index
from tests.making import ROOT

CONST = ROOT / "experiments" / "gpt2" / "const.yaml"  # a global batch of 32
GLOBAL_BATCH = "hyperparameters.global_batch_size"


def on(monkeypatch: pytest.MonkeyPatch, kind: str, devices: int) -> None:
    found = Accelerator(name=kind, num_devices=devices, bf16=kind == "cuda", fp16=kind == "cuda")
    monkeypatch.setattr(prepare, "detect_accelerator", lambda name: found)
    monkeypatch.delenv(VISIBLE, raising=False)


def prepared(folder: Path, elastic: tuple[int, int] | None, *overrides: str, **options: Any) -> LocalRun:
    options = {"run_dir": folder / "run", **options}
    placed = options.pop("placed", None)
    given = RunOptions(config=CONST, context_dir=ROOT, elastic=elastic, overrides=overrides, **options)
    return prepare_run(given, placed=placed)


def checkpoint_in(folder: Path, name: str = "aaaa", *, indexed: bool = True, **written_by: Any) -> Checkpoint:
    """One of a single engine, with nothing in it."""
    path = folder / "run" / "checkpoints" / name
    (path / "model0").mkdir(parents=True)
    (path / "load_data.json").write_text(json.dumps({"written_by": written_by}))
    if indexed:
        write_index(path / "model0", EngineIndex(tensors={}))
    write_manifest(path, {}, {"steps_completed": 3})
    return Checkpoint(uuid=name, steps_completed=3, path=path)


# ------------------------------------------------------------------------------------------- at the start


@pytest.mark.parametrize(
    ("gpus", "bounds", "slots"),
    [(8, (1, 4), 4), (3, (1, 4), 2), (1, (1, 4), 1), (8, (2, 3), 2), (8, (5, 8), 8), (64, (1, 64), 32)],
)
def test_it_starts_with_the_most_that_there_is_and_the_batch_divides_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, bounds: tuple[int, int], slots: int
) -> None:
    """Whatever slots_per_trial says, which is 2."""
    on(monkeypatch, "cuda", gpus)
    run = prepared(tmp_path, bounds)
    assert run.experiment.slots == run.resolved.topology.slots == slots
    assert run.resolved.batch.global_batch_size == 32
    assert "--elastic {}:{}".format(*bounds) in run.resume_command


@pytest.mark.parametrize(
    ("gpus", "bounds", "said"),
    [(1, (2, 4), "1 is left, and 2 is the least"), (8, (5, 7), "none of 5 to 7 slots")],
)
def test_bounds_that_cannot_be_kept_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, bounds: tuple[int, int], said: str
) -> None:
    on(monkeypatch, "cuda", gpus)
    with pytest.raises(ConfigError, match=said):
        prepared(tmp_path, bounds)


def test_what_contradicts_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "cpu", 2)
    with pytest.raises(ConfigError, match="so does --slots"):
        prepared(tmp_path, (1, 2), slots=2)
    ranks = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "machine": 0, "machines": 1}
    placed = Placement(launcher="torchrun", **ranks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="torchrun --nnodes"):
        prepared(tmp_path, (1, 2), placed=placed)
    with pytest.raises(ConfigError, match="--reset-optimizer: is for --resume"):
        prepared(tmp_path, None, reset_optimizer=True)


# ------------------------------------------------------------------------------------------- lost for good


def killed(rank: int, code: int = -9) -> Outcome:
    others = [Failure(rank=each, code=-9, time=2.0, ended_by_us=True) for each in range(4) if each != rank]
    return Outcome(failures=(Failure(rank=rank, code=code, time=1.0), *others))


def ends(restarts: Restarts, outcomes: Sequence[Outcome]) -> list[int | str | None]:
    """Of each restart the rank that is lost, None where all start again; "over" where there is none."""
    found: list[int | str | None] = []
    for outcome in outcomes:
        again = restarts.after(outcome)
        found.append("over" if again is None else again.lost)
    return found


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([3, 3], [None, 3]),
        ([3, 1, 1], [None, None, 1]),  # another rank: that may be chance
        ([3, 3, 2, 2], [None, 3, None, 2]),  # without it ranks are numbered anew
        ([3, 3, 2, 1, 0, 1, 0], [None, 3, None, None, None, None, "over"]),  # of five restarts
    ],
)
def test_a_rank_is_lost_where_it_ends_the_run_twice_in_a_row(
    tmp_path: Path, ranks: list[int], found: list[int | str | None]
) -> None:
    restarts = Restarts(allowed=5, run_dir=tmp_path / "run", elastic=True)
    assert ends(restarts, [killed(rank) for rank in ranks]) == found
    plain = Restarts(allowed=5, run_dir=tmp_path / "run")
    assert set(ends(plain, [killed(rank) for rank in ranks[:4]])) == {None}


def test_a_new_checkpoint_in_between_shows_that_it_lives(tmp_path: Path) -> None:
    restarts = Restarts(allowed=5, run_dir=tmp_path / "run", elastic=True)
    assert ends(restarts, [killed(3)]) == [None]
    checkpoint_in(tmp_path)
    assert ends(restarts, [killed(3), killed(3)]) == [None, 3]


def test_a_rank_that_hangs_or_finds_no_device_is_lost_too(tmp_path: Path) -> None:
    alone = Failure(rank=2, code=1, exit_code=1, cause=CRASH, time=1.0)
    crashed = Outcome(failures=(alone, *killed(2).failures[1:]))
    hangs = Outcome(hang=Hang(behind=(2,), seconds=60, steps=1, stack=""))
    for outcome in (crashed, hangs, killed(2, EXIT_CRASHED)):
        restarts = Restarts(allowed=1, run_dir=tmp_path / "run", elastic=True)
        assert ends(restarts, [outcome, outcome]) == [None, 2]
    assert ends(Restarts(allowed=1, run_dir=tmp_path / "run"), [crashed]) == ["over"]


@pytest.mark.parametrize("why", ["a signal", "its configuration", "the code of all ranks", "no restarts"])
def test_what_another_start_would_not_change_is_no_loss(tmp_path: Path, why: str) -> None:
    outcome = {
        "a signal": replace(killed(1), signals=(15,)),
        "its configuration": Outcome(
            failures=(Failure(rank=1, code=2, exit_code=EXIT_CONFIG, cause="configuration", time=1.0),)
        ),
        "the code of all ranks": Outcome(
            failures=tuple(
                Failure(rank=rank, code=1, exit_code=1, cause=CRASH, time=1.0) for rank in range(4)
            )
        ),
        "no restarts": killed(1),
    }[why]
    restarts = Restarts(allowed=0 if why == "no restarts" else 5, run_dir=tmp_path / "run", elastic=True)
    assert ends(restarts, [outcome, outcome]) == ["over", "over"]


# ------------------------------------------------------------------------------------------- on those that are left


def test_on_cpus_there_is_one_fewer_and_the_batch_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on(monkeypatch, "cpu", 4)
    run = prepared(tmp_path, (1, 4))
    seed = run.experiment.trial_seed
    fewer = without_rank(run, 3, checkpoint_in(tmp_path))
    assert (run.experiment.slots, fewer.experiment.slots) == (4, 2)  # 3 replicas do not divide 32
    assert fewer.resolved.batch.global_batch_size == 32
    assert fewer.resolved.topology.slots == 2
    assert fewer.experiment.trial_seed == seed
    assert fewer.experiment.config["resources"]["slots_per_trial"] == 2
    assert without_rank(fewer, 0, None).experiment.slots == 1


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, "0,1,3,4,5,6,7"), ("7,6,5,4", "7,6,4"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-a,GPU-b,GPU-d")],
)
def test_on_gpus_the_device_of_the_rank_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, left: str
) -> None:
    """A spare one takes its place, where there is any."""
    on(monkeypatch, "cuda", 8 if visible is None else 4)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    fewer = without_rank(prepared(tmp_path, (1, 4)), 2, None)
    assert fewer.variables.values[VISIBLE] == left
    assert fewer.experiment.slots == (4 if visible is None else 2)
    again = without_rank(fewer, 0, None)
    assert again.variables.values[VISIBLE] == left.partition(",")[2]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"indexed": False}, "its files are not DeepSpeed"),
        ({"own_layout": "Mine.save decides itself"}, "Mine.save decides itself"),
        (
            {"data_apart": ["Shards", False], "replicas": 4, "micro_batch_size": 8},
            "Shards gives each replica",
        ),
    ],
)
def test_a_checkpoint_that_fewer_cannot_read_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    on(monkeypatch, "cpu", 4)
    with pytest.raises(ConfigError, match=said):
        without_rank(prepared(tmp_path, (1, 4)), 3, checkpoint_in(tmp_path, **how))


def test_bounds_that_are_reached_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on(monkeypatch, "cpu", 4)
    with pytest.raises(ConfigError, match="3 slots can run"):
        without_rank(prepared(tmp_path, (3, 4)), 3, None)
    with pytest.raises(ConfigError, match="3 are left, and 4 is the least"):
        without_rank(prepared(tmp_path, (4, 4)), 3, None)
