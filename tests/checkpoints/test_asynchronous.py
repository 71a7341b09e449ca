"""Checkpoints that are written while training continues: what is in them, and what happens where writing fails."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from tests.harness.command import ROOT, det_ds
from tests.harness.object_storage import manager_of
from tests.harness.ranks import Ranks
from tests.interrupted.compared import differences, last_words
from tests.interrupted.experiments import experiment
from tests.package import checkpoints, contents, damage, tensors, uploaded_to, while_writing

BATCHES = 6


def trial_class(own_save: bool = False) -> Any:
    from determined_ds import DataParallelTrial

    class Line(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(model(inputs), targets)

        def build_training_data_loader(self) -> Any:
            inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
            data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.build_training_data_loader()

    class WithOwnSave(Line):
        def save(self, context: Any, path: Path) -> None:
            super().save(context, path)
            if context.distributed.rank == 0:
                (path / "vocabulary.txt").write_text("words")

    return WithOwnSave if own_save else Line


class Recorded:
    """A value that says which threads have pickled it."""

    threads: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> Any:
        self.threads.append(threading.current_thread().name)
        return (Recorded, ())

    def __deepcopy__(self, memo: Any) -> Recorded:
        return self


def train(
    run_dir: str,
    *,
    asynchronous: bool | None,
    end_at: int = 5,
    stage: int = 1,
    fails_on: int | None = None,
    own_save: bool = False,
    full_from: int | None = None,
    period: int = 3,
    reporting: int = 100,
    recorded: bool = False,
    storage: dict[str, Any] | None = None,
    bucket_later: str = "",
    **fit: Any,
) -> dict[str, Any]:
    """In a rank: train six batches with a checkpoint after the third; a slow writer ends with batch ``end_at``.

    With a ``storage``, checkpoints go there, and from the second batch on to ``bucket_later``. Its callback has a state
    that is ``recorded``, or none.

    Returns what was seen: the files of each checkpoint as it is completed and what has pickled the state, how many were
     sealed after each batch, how many were written by a thread, their uuids, and what was raised.
    """
    from determined import core
    from determined.pytorch import Batch, PyTorchCallback

    from determined_ds import Trainer, open_context

    seen: dict[str, Any] = {"complete": [], "pickled_by": [], "sealed_by": {}, "aside": 0, "uuids": []}
    seen["error"], may_end = "", threading.Event()

    class Watching(PyTorchCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"state": Recorded()} if recorded else {}

        def on_checkpoint_end(self, checkpoint_dir: str) -> None:
            folder = Path(checkpoint_dir) / "model0"
            seen["complete"].append(sorted(file.name for file in folder.iterdir()))
            seen["pickled_by"].append(list(Recorded.threads))
            Recorded.threads.clear()

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            seen["uuids"].append(uuid)

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            seen["sealed_by"][batch_idx + 1] = len(checkpoints(Path(run_dir)))
            if batch_idx == 1 and storage and bucket_later:
                storage["bucket"] = bucket_later
            if batch_idx + 1 == full_from:
                mock.patch("shutil.disk_usage", return_value=SimpleNamespace(total=9, used=9, free=0)).start()
            if batch_idx + 1 >= end_at:
                may_end.set()
                time.sleep(0.1)  # it ends before the next report

    torch.serialization.add_safe_globals([Recorded])
    ds_config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    with (
        open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context,
        uploaded_to(storage) if storage else contextlib.nullcontext(),
    ):

        def wait() -> None:
            seen["aside"] += 1
            assert may_end.wait(30)
            if context.distributed.rank == fails_on:
                raise PermissionError(13, "Permission denied", "there")

        while_writing(wait)
        if storage:
            manager = manager_of(dict(storage), Path(run_dir, "tmp"))
            context._core.checkpoint = core.DummyCheckpointContext(context.distributed, manager)
        trial = trial_class(own_save)(context)
        trial.build_callbacks = lambda: {"watching": Watching()}
        try:
            Trainer(trial, context).fit(
                max_length=Batch(BATCHES),
                checkpoint_period=Batch(period),
                reporting_period=Batch(reporting),
                checkpoint_policy="none",
                asynchronous_checkpoints=asynchronous,
                **fit,
            )
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        for uuid in seen["uuids"] if storage else ():
            manager.download(uuid, Path(run_dir, uuid, str(context.distributed.rank)))
    seen["threads"] = [thread.name for thread in threading.enumerate()]
    return seen


def at(run_dir: Path, steps: int) -> Path:
    """The checkpoint of a batch, which is intact."""
    (found,) = (path for path in checkpoints(run_dir) if steps_of(path) == steps)
    assert damage(found) is None
    return found


def held_by(checkpoint: Path) -> dict[str, Any]:
    """Its tensors and all else, less the sums of squares in its index: they depend on where in memory a tensor lay."""
    found = contents(checkpoint)
    del found["model0/index.json"]
    return {**found, "tensors": tensors(checkpoint)}


def steps_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "metadata.json").read_text())["steps_completed"])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_training_changes_during_the_write_is_not_in_it(
    stage: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """The writer ends two steps later: the checkpoint is that of a run which waited, to the bit."""
    two_ranks.run(train, str(tmp_path / "waits"), asynchronous=False, stage=stage)
    seen = two_ranks.run(train, str(tmp_path / "goes on"), asynchronous=True, stage=stage)
    assert [each["error"] for each in seen] == ["", ""]
    for each in seen:
        assert each["aside"] == 1  # the last one has nothing to go on with
        assert "checkpoint-writer" not in each["threads"]
        assert each["sealed_by"][4] == each["sealed_by"][5] == 0
        assert all("index.json" in names for names in each["complete"])
    for steps in (3, 6):
        waited, went_on = (held_by(at(tmp_path / name, steps)) for name in ("waits", "goes on"))
        assert differences(waited, went_on) == []


def test_a_third_waits_for_the_first_and_they_are_sealed_in_order(two_ranks: Ranks, tmp_path: Path) -> None:
    """One is written, one is copied meanwhile: the first two batches do not wait, the third does.

    A rank's own part is pickled by the thread; that of the first at once, to try whether it can be read back.
    """
    how = {"end_at": 3, "period": 1, "save_total_limit": 2, "recorded": True}
    for seen in two_ranks.run(train, str(tmp_path), asynchronous=True, **how):
        assert {thread for each in seen["pickled_by"][1:-1] for thread in each} == {"checkpoint-writer"}
    assert [steps_of(path) for path in checkpoints(tmp_path)] == [6, 5]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("period", [3, 1])
def test_an_error_of_one_writer_stops_all_ranks_with_its_cause(
    period: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Nothing is left of it, nor of the one after it, which had begun."""
    how = {"fails_on": 1, "end_at": period + 1, "reporting": 1, "period": period}
    seen = two_ranks.run(train, str(tmp_path), asynchronous=True, **how)
    for each in seen:
        assert each["error"].startswith(
            f"CheckpointError: the checkpoint of batch {period} could not be written"
        )
        assert "rank 1: PermissionError: [Errno 13] Permission denied: 'there'\n  fix: " in each["error"]
        assert max(each["sealed_by"]) < BATCHES
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_where_the_next_one_does_not_fit_the_one_being_written_is_completed(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """And a limit may delete one when it is complete, so that there may be room then."""
    for each in two_ranks.run(train, str(tmp_path), asynchronous=True, end_at=6, full_from=6):
        assert each["error"].startswith("CheckpointError: ")
        assert "a checkpoint takes about" in each["error"]
    assert [steps_of(path) for path in checkpoints(tmp_path)] == [3]


def test_files_of_an_own_save_are_in_it(two_ranks: Ranks, tmp_path: Path) -> None:
    [seen, _] = two_ranks.run(train, str(tmp_path), asynchronous=True, own_save=True)
    assert seen["aside"] == 1
    for steps in (3, 6):
        assert (at(tmp_path, steps) / "vocabulary.txt").read_text() == "words"


def test_a_small_one_and_one_that_a_trial_writes_itself_are_written_at_once(
    one_rank: Ranks, tmp_path: Path
) -> None:
    for number, own_save in enumerate((False, True)):
        [seen] = one_rank.run(train, str(tmp_path / str(number)), asynchronous=None, own_save=own_save)
        assert (seen["aside"], seen["error"]) == (0, "")


def test_a_test_run_writes_as_training_would_and_waits(one_rank: Ranks, tmp_path: Path) -> None:
    [seen] = one_rank.run(train, str(tmp_path), asynchronous=True, end_at=1, test_mode=True)
    assert (seen["error"], seen["aside"]) == ("", 1)
    assert len(checkpoints(tmp_path)) == 1


def refused(run_dir: str) -> str:
    """In a rank: train where a machine has a kilobyte left."""
    with mock.patch("psutil.virtual_memory", return_value=SimpleNamespace(total=2**30, available=1000)):
        return str(train(run_dir, asynchronous=True)["error"])


def test_where_it_is_stated_and_memory_lacks_nothing_is_trained(one_rank: Ranks, tmp_path: Path) -> None:
    [error] = one_rank.run(refused, str(tmp_path))
    assert error.startswith("ConfigError: hyperparameters.fit.asynchronous_checkpoints = true: two copies of")
    assert not (tmp_path / "metrics.jsonl").exists()


def killed_again_and_again(tmp_path: Path, kills: int) -> None:
    """Kill a run in the middle of writing, resume, and so on; then to the end."""
    told = experiment(zero=1, asynchronous=True)
    fit = told["hyperparameters"]["fit"]
    fit |= {"max_length": {"batches": 3 * kills + 4}, "checkpoint_period": {"batches": 1}}
    config, there = tmp_path / "victim.yaml", tmp_path / "killed"
    config.write_text(yaml.safe_dump(told))
    command: list[str | Path] = ["run", config, ROOT, "--run-dir", there]
    done = 0
    for number in range(kills):
        kill_at = f"{'before' if number % 2 else 'after'}:{done + 4}"
        killed = det_ds(*command, env={"KILL_AT": kill_at, "SLOW_WRITES": "0.05"})
        assert killed.returncode == 1, (kill_at, killed.stdout, killed.stderr)
        said = [line.split() for line in killed.stdout.splitlines() if line.startswith("checkpoint ")]
        found = checkpoints(there)
        steps = {path.name: steps_of(path) for path in found}
        for _, _, batch, uuid, *_ in said:  # what was sealed is there, and as it was written
            assert steps[uuid] == int(batch)
        if found:
            assert damage(found[0]) is None
            assert steps[found[0].name] >= done
            done = steps[found[0].name]
        command = [*command[:5], "--resume"]
    resumed = det_ds(*command)
    assert resumed.returncode == 0, resumed.stderr
    whole = det_ds("run", config, ROOT, "--run-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert differences(last_words(tmp_path / "whole"), last_words(there)) == []


@pytest.mark.long("real waiting; launch/test_ranks has hangs")
def test_a_slow_storage_is_not_taken_for_a_rank_that_hangs(tmp_path: Path) -> None:
    """The third checkpoint waits for the first for longer than a rank may be silent."""
    told = experiment(zero=1, asynchronous=True)
    told["hyperparameters"]["fit"] |= {"max_length": {"batches": 4}, "checkpoint_period": {"batches": 1}}
    config = tmp_path / "victim.yaml"
    config.write_text(yaml.safe_dump(told))
    done = det_ds(
        "run",
        config,
        ROOT,
        "--run-dir",
        tmp_path / "run",
        env={"SLOW_WRITES": "2", "DETERMINED_DS_HANG_TIMEOUT": "0.02"},
    )
    assert done.returncode == 0, done.stderr
    assert "waiting     for the checkpoint of batch 1, which is still written" in done.stdout
    found = [line for line in done.stdout.splitlines() if line.startswith("checkpoint ")]
    assert [line.split()[2] for line in found] == ["1", "2", "3", "4"]
    assert ["  written in " in line for line in found] == [True] * 3 + [False]


def test_a_kill_in_the_middle_of_a_write_leaves_the_last_sealed_one(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, kills=2)


@pytest.mark.long("a hundred kills: the test before has two")
def test_a_hundred_kills_lose_nothing_that_was_sealed(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, kills=100)


@pytest.mark.parametrize("bucket", ["", "no-such-bucket"])
def test_it_is_uploaded_by_another_process_and_a_storage_that_refuses_it_stops_the_run(
    bucket: str, s3: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    how = {"storage": {**s3, "prefix": tmp_path.name}, "bucket_later": bucket}
    for rank, seen in enumerate(two_ranks.run(train, str(tmp_path), asynchronous=True, **how)):
        assert (len(seen["uuids"]), bool(seen["error"])) == ((0, True) if bucket else (2, False)), seen
        assert all(damage(tmp_path / uuid / str(rank)) is None for uuid in seen["uuids"])
        if bucket:
            said = "CheckpointError: the checkpoint of batch 3 could not be written"
            assert seen["error"].startswith(said), seen["error"]
            assert "checkpoint_storage refuses it: " in seen["error"]
            assert "NoSuchBucket" in seen["error"]
