"""Checkpoints that are written while training continues: what is in them, and what happens where writing fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from determined_ds.protocol.checkpoint_files import PARTIAL, checkpoints_in, damage_of
from determined_ds.protocol.handed_on import HANG_TIMEOUT
from tests.command import ROOT, det_ds
from tests.ranks import Ranks
from tests.runtime.test_resume import experiment
from tests.runtime.victim import differences, last_words

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


class Slow:
    """``write_shard`` that waits, before its last bytes, until it may end; or that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        from determined_ds.runtime.checkpoints import all_engines as engines

        self._write = engines.write_shard
        self._error = error
        self.may_end = threading.Event()
        self.in_main_thread: list[bool] = []
        monkeypatch.setattr(engines, "write_shard", self)

    def __call__(self, path: Path, slices: Any, beat: Callable[[], None], **how: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        self.in_main_thread.append(is_main)
        if not is_main:
            path.write_bytes(b"half")
            assert self.may_end.wait(30)
            if self._error is not None:
                raise self._error
        return self._write(path, slices, beat, **how)


def train(
    run_dir: str,
    *,
    asynchronous: bool | None,
    end_at: int = 5,
    stage: int = 1,
    fails_on: int | None = None,
    own_save: bool = False,
    period: int = 3,
    reporting: int = 100,
    **fit: Any,
) -> dict[str, Any]:
    """In a rank: train six batches with a checkpoint after the third; a slow writer ends with batch ``end_at``."""
    from determined.pytorch import Batch, PyTorchCallback

    from determined_ds import Trainer, open_context

    seen: dict[str, Any] = {"complete": [], "uploaded": [], "sealed_by": {}, "error": ""}
    checkpoints = Path(run_dir) / "checkpoints"

    class Watching(PyTorchCallback):
        def on_checkpoint_end(self, checkpoint_dir: str) -> None:
            folder = Path(checkpoint_dir) / "model0"
            seen["complete"].append(sorted(file.name for file in folder.iterdir()))

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            seen["uploaded"].append(uuid)

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            seen["sealed_by"][batch_idx + 1] = len(checkpoints_in(checkpoints))
            if batch_idx + 1 >= end_at:
                slow.may_end.set()
                time.sleep(0.1)  # it ends before the next report

    ds_config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context,
    ):
        fails = context.distributed.rank == fails_on
        slow = Slow(monkeypatch, PermissionError(13, "Permission denied", "there") if fails else None)
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
        seen["in_main_thread"] = slow.in_main_thread
    return seen


def states_of(folder: Path, steps: int) -> dict[str, Any]:
    """All states in the checkpoint of a batch, to be compared bit by bit."""
    [found] = [each for each in checkpoints_in(folder / "checkpoints") if each.steps_completed == steps]
    assert damage_of(found.path) is None
    from determined_ds.runtime.checkpoints.any_layout import stored_engine
    from determined_ds.runtime.checkpoints.contents import only_data

    stored = stored_engine(found.path / "model0")
    assert stored is not None
    with only_data():
        settings = stored.settings
        parts = [torch.load(file) for file in sorted(found.path.glob("*.pth"))]
    tensors = {
        f"{name}/{state}": stored.whole(name, state)
        for name, tensor in stored.index.tensors.items()
        for state in tensor.states
    }
    scalars = {name: dict(tensor.scalars) for name, tensor in stored.index.tensors.items()}
    return {"tensors": tensors, "scalars": scalars, "settings": settings, "parts": parts}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_training_changes_during_the_write_is_not_in_it(
    stage: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """The writer ends two steps later: the checkpoint is that of a run which waited, to the bit."""
    two_ranks.run(train, str(tmp_path / "waits"), asynchronous=False, stage=stage)
    seen = two_ranks.run(train, str(tmp_path / "goes on"), asynchronous=True, stage=stage)
    assert [each["error"] for each in seen] == ["", ""]
    for each in seen:
        assert each["in_main_thread"] == [False, True]  # the last one has nothing to go on with
        assert each["sealed_by"][4] == each["sealed_by"][5] == 0
        assert all("index.json" in names for names in each["complete"])
    for steps in (3, 6):
        assert differences(states_of(tmp_path / "waits", steps), states_of(tmp_path / "goes on", steps)) == []


def test_a_third_waits_for_the_first_and_they_are_sealed_in_order(two_ranks: Ranks, tmp_path: Path) -> None:
    """One is written, one is copied meanwhile: the first two batches do not wait, the third does."""
    two_ranks.run(train, str(tmp_path), asynchronous=True, end_at=3, period=1, save_total_limit=2)
    kept = [each.steps_completed for each in checkpoints_in(tmp_path / "checkpoints")]
    assert kept == [6, 5]
    assert not list((tmp_path / "checkpoints").glob(f".*{PARTIAL}"))


@pytest.mark.parametrize("period", [3, 1])
def test_an_error_of_one_writer_stops_all_ranks_with_its_cause(
    period: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Nothing is left of it, nor of the one after it, which had begun."""
    how = {"fails_on": 1, "end_at": period + 1, "reporting": 1, "period": period}
    seen = two_ranks.run(train, str(tmp_path), asynchronous=True, **how)
    for each in seen:
        assert each["error"].startswith(
            f"CheckpointError: the checkpoint of batch {period} could not be written, and there is none before it: "
            "rank 1: PermissionError: [Errno 13] Permission denied: 'there'\n  fix: "
        )
        assert max(each["sealed_by"]) < BATCHES
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_files_of_an_own_save_are_in_it(two_ranks: Ranks, tmp_path: Path) -> None:
    [seen, _] = two_ranks.run(train, str(tmp_path), asynchronous=True, own_save=True)
    assert seen["in_main_thread"] == [False, True]
    for found in checkpoints_in(tmp_path / "checkpoints"):
        assert damage_of(found.path) is None
        assert (found.path / "vocabulary.txt").read_text() == "words"


def test_a_small_one_and_one_that_a_trial_writes_itself_are_written_at_once(
    one_rank: Ranks, tmp_path: Path
) -> None:
    for number, own_save in enumerate((False, True)):
        [seen] = one_rank.run(train, str(tmp_path / str(number)), asynchronous=None, own_save=own_save)
        assert seen["in_main_thread"] == [True, True]


def test_a_test_run_writes_as_training_would_and_waits(
    one_rank: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [seen] = one_rank.run(train, str(tmp_path), asynchronous=True, end_at=1, test_mode=True)
    assert (seen["error"], seen["in_main_thread"]) == ("", [False])
    assert len(checkpoints_in(tmp_path / "checkpoints")) == 1


def test_memory_for_two_copies_is_required_before_training() -> None:
    from determined_ds.runtime.checkpoints.aside import RankCopies, lack_of_memory

    def rank(machine: int, copy: int, available: int) -> RankCopies:
        return RankCopies(machine, copy * 2**30, available * 2**30)

    assert lack_of_memory([rank(0, 2, 8), rank(0, 2, 8), rank(1, 4, 8)]) == ""
    assert lack_of_memory([rank(0, 2, 8), rank(0, 2, 8), rank(1, 4, 7)]) == (
        "two copies of what 1 rank writes take 8 GiB of host memory, and 7 GiB are available"
    )


def refused(run_dir: str) -> str:
    """In a rank: train where a machine has a kilobyte left."""
    from determined_ds.runtime.checkpoints import aside

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(aside, "available_bytes", lambda: 1000)
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
        found = {each.uuid: each for each in checkpoints_in(there / "checkpoints")}
        for _, _, batch, uuid, *_ in said:  # what was sealed is there, and as it was written
            assert found[uuid].steps_completed == int(batch)
        newest = max(found.values(), key=lambda each: each.steps_completed, default=None)
        if newest is not None:
            assert damage_of(newest.path) is None
            assert newest.steps_completed >= done
            done = newest.steps_completed
        command = [*command[:5], "--resume"]
    resumed = det_ds(*command)
    assert resumed.returncode == 0, resumed.stderr
    whole = det_ds("run", config, ROOT, "--run-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert differences(last_words(tmp_path / "whole"), last_words(there)) == []


def test_a_slow_storage_is_not_taken_for_a_rank_that_hangs(tmp_path: Path) -> None:
    """The third checkpoint waits for the first for longer than a rank may be silent."""
    told = experiment(zero=1, asynchronous=True)
    told["hyperparameters"]["fit"] |= {"max_length": {"batches": 4}, "checkpoint_period": {"batches": 1}}
    config = tmp_path / "victim.yaml"
    config.write_text(yaml.safe_dump(told))
    done = det_ds(
        "run", config, ROOT, "--run-dir", tmp_path / "run", env={"SLOW_WRITES": "2", HANG_TIMEOUT: "0.02"}
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


def train_elsewhere(run_dir: str, storage: dict[str, Any], wrong: str) -> tuple[str, list[str]]:
    """In a rank: train with checkpoints in S3, which is changed at batch 2. Returns the error, and what is there."""
    from determined.pytorch import Batch, PyTorchCallback

    from determined_ds import Trainer, open_context

    class Breaking(PyTorchCallback):
        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            if batch_idx == 1 and wrong:
                checkpoints.config |= {"bucket": wrong}

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            uuids.append(uuid)

    uuids: list[str] = []
    ds_config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    exp_conf = {"checkpoint_storage": storage}
    said = ""
    with open_context(
        hparams=hparams, exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu", storage=True
    ) as context:
        checkpoints = context._core.checkpoint
        trial = trial_class()(context)
        trial.build_callbacks = lambda: {"breaking": Breaking()}
        lengths = {"max_length": Batch(BATCHES), "checkpoint_period": Batch(3)}
        try:
            Trainer(trial, context).fit(**lengths, checkpoint_policy="none", asynchronous_checkpoints=True)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        for uuid in uuids:
            checkpoints._storage_manager.download(uuid, Path(run_dir, uuid, str(context.distributed.rank)))
        return said, uuids


def test_it_is_uploaded_by_another_process(s3: dict[str, Any], two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(train_elsewhere, str(tmp_path), {**s3, "prefix": tmp_path.name}, "")
    for rank, (said, uuids) in enumerate(found):
        assert (said, len(uuids)) == ("", 2)
        for uuid in uuids:
            assert damage_of(tmp_path / uuid / str(rank)) is None


def test_a_storage_that_refuses_it_stops_the_run(
    s3: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    found = two_ranks.run(train_elsewhere, str(tmp_path), {**s3, "prefix": tmp_path.name}, "no-such-bucket")
    for said, uuids in found:
        assert uuids == []
        assert said.startswith("CheckpointError: the checkpoint of batch 3 could not be written"), said
        assert "checkpoint_storage refuses it: " in said
        assert "NoSuchBucket" in said
