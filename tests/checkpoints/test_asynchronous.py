"""Checkpoints that are written while training continues: what is in them, and what happens where writing fails."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from tests.cli.own_runs import at, steps_of
from tests.harness.command import ROOT, det_ds
from tests.harness.object_storage import manager_of
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, last_words
from tests.interrupted.experiments import experiment
from tests.package import checkpoints, contents, damage, tensors, uploaded_to, while_writing
from tests.train.small import fit, hyperparameters, linear_trial, saved_steps

BATCHES = 6


def train(
    run_dir: Path,
    *,
    asynchronous: bool = True,
    end_at: int = 5,
    stage: int = 1,
    own_save: bool = False,
    trouble: str = "",
    storage: dict[str, Any] | None = None,
    period: int = 3,
    **arguments: Any,
) -> dict[str, Any]:
    """In a rank: train six batches with a checkpoint after each ``period``; a slow writer ends with batch ``end_at``.

    A ``trouble`` is ``denied``: rank 1 may not write; ``memory``: 100 bytes are left; ``gone``: the bucket is, from the
    second batch on. Returns what was seen, and what was raised.
    """
    from determined import core
    from determined.pytorch import PyTorchCallback

    seen: dict[str, Any] = {"sealed_by": {}, "aside": 0, "uuids": []}
    rank, may_end, manager = int(os.environ["RANK"]), threading.Event(), None
    if storage is not None:
        manager = manager_of(dict(storage), run_dir / "tmp")

    def wait() -> None:
        seen["aside"] += 1
        assert may_end.wait(30)
        if trouble == "denied" and rank == 1:
            raise PermissionError(13, "Permission denied", "there")

    class Watching(PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            seen["uuids"].append(uuid)

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            seen["sealed_by"][batch_idx + 1] = len(checkpoints(run_dir))
            if trouble == "gone" and storage is not None and batch_idx == 1:
                storage["bucket"] = "no-such-bucket"
            if batch_idx + 1 >= end_at:
                may_end.set()
                time.sleep(0.1)  # it ends before the next report

    class Line(linear_trial()):  # type: ignore[misc]
        def prepare(self) -> None:
            super().prepare()
            while_writing(wait)
            if manager is not None:
                self.context._core.checkpoint = core.DummyCheckpointContext(self.context.distributed, manager)

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))

        def build_callbacks(self) -> dict[str, Any]:
            return {"watching": Watching()}

        def save(self, context: Any, path: Path) -> None:
            super().save(context, path)
            if rank == 0 and own_save:
                (path / "vocabulary.txt").write_text("words")

    arguments |= {"max_length": ("batches", BATCHES), "checkpoint_period": ("batches", period)}
    arguments |= {"reporting_period": ("batches", 1), "checkpoint_policy": "none"}
    left = mock.patch("psutil.virtual_memory", return_value=SimpleNamespace(total=2**30, available=100))
    with contextlib.ExitStack() as stack:
        if storage:
            stack.enter_context(uploaded_to(storage))
        if trouble == "memory":
            stack.enter_context(left)
        try:
            hparams = hyperparameters(stage)
            fit(run_dir, Line, hparams=hparams, asynchronous_checkpoints=asynchronous, **arguments)
            seen["error"] = ""
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
    for uuid in seen["uuids"] if manager is not None else ():
        manager.download(uuid, run_dir / uuid / str(rank))
    return {**seen, "threads": [thread.name for thread in threading.enumerate()]}


def held_by(run_dir: Path, steps: int) -> dict[str, Any]:
    """All of the checkpoint of a batch, less the sums of squares in its index: they depend on where a tensor lay."""
    found = at(run_dir, steps)
    assert damage(found) is None
    held = contents(found)
    del held["model0/index.json"]
    return {**held, "tensors": tensors(found), "own": [each.read_text() for each in found.glob("*.txt")]}


@pytest.mark.parametrize(("stage", "own_save"), [(0, False), (1, False), (3, True)])
def test_what_training_changes_during_the_write_is_not_in_it(
    stage: int, own_save: bool, two_ranks: Ranks, tmp_path: Path
) -> None:
    """The writer ends two steps later: the checkpoint is that of a run which waited, to the bit."""
    how = {"stage": stage, "own_save": own_save}
    two_ranks.run(train, tmp_path / "waits", asynchronous=False, **how)
    for seen in two_ranks.run(train, tmp_path / "goes on", **how):
        assert seen["error"] == ""
        assert seen["aside"] == 1  # the last one has nothing to go on with
        assert "checkpoint-writer" not in seen["threads"]
        assert seen["sealed_by"][4] == seen["sealed_by"][5] == 0
    for steps in (3, 6):
        waited, went_on = (held_by(tmp_path / name, steps) for name in ("waits", "goes on"))
        assert differences(waited, went_on) == []
        assert went_on["own"] == (["words"] if own_save else [])


def test_each_waits_for_the_one_before_and_they_are_sealed_in_order(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train, tmp_path, end_at=1, period=1, save_total_limit=2)
    assert saved_steps(tmp_path) == [5, 6]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("denied", "CheckpointError: the checkpoint of batch 3 could not be written"),
        (
            "memory",
            "ConfigError: hyperparameters.fit.asynchronous_checkpoints = true: copies of what 2 ranks",
        ),
    ],
)
def test_where_one_cannot_be_written_all_ranks_stop_with_the_cause(
    trouble: str, said: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Nothing is left of it."""
    for seen in two_ranks.run(train, tmp_path, trouble=trouble, end_at=1):
        assert said in seen["error"]
        if trouble == "denied":
            assert "rank 1: PermissionError: [Errno 13] Permission denied: 'there'\n  fix: " in seen["error"]
            assert max(seen["sealed_by"]) < BATCHES
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize("trouble", ["", "gone"])
def test_it_is_uploaded_by_another_process_and_a_storage_that_refuses_it_stops_the_run(
    trouble: str, s3: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    said = ("batch 3 could not be written", "checkpoint_storage refuses it: ", "NoSuchBucket")
    storage = {**s3, "prefix": tmp_path.name}
    for rank, seen in enumerate(two_ranks.run(train, tmp_path, storage=storage, trouble=trouble)):
        assert len(seen["uuids"]) == (0 if trouble else 2), seen
        assert all(damage(tmp_path / uuid / str(rank)) is None for uuid in seen["uuids"])
        assert all(words in seen["error"] for words in said) if trouble else seen["error"] == ""


def command_of(folder: Path, batches: int) -> list[str | Path]:
    """A run with a checkpoint after each batch."""
    config = experiment(zero=1, asynchronous=True)
    length = {"max_length": {"batches": batches}, "checkpoint_period": {"batches": 1}}
    config["hyperparameters"]["fit"] |= length
    (folder / "victim.yaml").write_text(yaml.safe_dump(config))
    return ["run", folder / "victim.yaml", ROOT, "--run-dir"]


@pytest.mark.parametrize(
    "kills", [2, pytest.param(100, marks=pytest.mark.long("a hundred kills: the case before has two"))]
)
def test_kills_in_the_middle_of_a_write_lose_nothing_that_was_sealed(kills: int, tmp_path: Path) -> None:
    """Each run resumes from the last sealed one; the last goes to the end, which is that of a run without kills."""
    command, there = command_of(tmp_path, 3 * kills + 4), tmp_path / "killed"
    done, more = 0, list[str]()
    for number in range(kills):
        kill_at = f"{'before' if number % 2 else 'after'}:{done + 4}"
        killed = det_ds(*command, there, *more, env={"KILL_AT": kill_at, "SLOW_WRITES": "0.05"})
        assert killed.returncode == 1, (kill_at, killed.stdout, killed.stderr)
        found = checkpoints(there)
        steps = {path.name: steps_of(path) for path in found}
        for line in killed.stdout.splitlines():  # what was sealed is there, and as it was written
            if line.startswith("checkpoint "):
                _, _, batch, uuid, *_ = line.split()
                assert steps[uuid] == int(batch)
        if found:
            assert damage(found[0]) is None
            assert steps[found[0].name] >= done
            done = steps[found[0].name]
        more = ["--resume"]
    for run_dir, options in ((there, more), (tmp_path / "whole", [])):
        ended = det_ds(*command, run_dir, *options)
        assert ended.returncode == 0, ended.stderr
    assert differences(last_words(tmp_path / "whole"), last_words(there)) == []
