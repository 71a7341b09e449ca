"""The loop as a trial sees it: epochs, callbacks, metrics, profiling, TensorBoard; and where Determined's differs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds.protocol.checkpoint_files import checkpoints_in, damage_of
from tests.ranks import Ranks

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 40, 8
BATCHES_PER_EPOCH = NUM_SAMPLES // GLOBAL_BATCH_SIZE


def hyperparameters(**more: Any) -> dict[str, Any]:
    ds_config = {"zero_optimization": {"stage": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    return {"global_batch_size": GLOBAL_BATCH_SIZE, "deepspeed_config": ds_config, **more}


def trial_class() -> Any:
    """A linear model that notes what is called, made where deepspeed is loaded: in a rank."""
    import torch
    from determined import pytorch

    from determined_ds import DataParallelTrial

    class Noting(pytorch.PyTorchCallback):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_training_epoch_start(self, epoch_idx: int) -> None:
            self.calls.append(("epoch start", epoch_idx))

        def on_training_epoch_end(self, epoch_idx: int) -> None:
            self.calls.append(("epoch end", epoch_idx))

        def on_validation_end(self, metrics: dict[str, Any]) -> None:
            self.calls.append("validation")

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            self.calls.append("checkpoint")

        def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
            self.calls.append("report")

    class Linear(DataParallelTrial):
        def prepare(self) -> None:
            inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))
            self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])
            self.noting = Noting()
            self.batches: list[tuple[int, int]] = []

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 2)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            return torch.nn.functional.mse_loss(model(inputs), targets)

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.batches.append((epoch_idx, batch_idx))
            self.noting.calls.append(("batch", batch_idx))
            return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

        def build_training_data_loader(self) -> Any:
            return self.training_loader(self.data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(self.data)

        def build_callbacks(self) -> dict[str, Any]:
            return {"noting": self.noting}

        def tokens_per_sample(self) -> int:
            return 3

    return Linear


def train(run_dir: str, profile: bool = False, searcher: dict[str, Any] | None = None, **fit: Any) -> Any:
    """In a rank: train with ours, and return what the trial noted."""
    import torch

    from determined_ds import Trainer, open_context

    exp_conf = {"searcher": searcher} if searcher else None
    with open_context(
        hparams=hyperparameters(), exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu"
    ) as context:
        trial = trial_class()(context)
        if profile:
            context.set_profiler(schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2))
        Trainer(trial, context).fit(**_units(fit))
        return trial.noting.calls, trial.batches


def _units(fit: dict[str, Any]) -> dict[str, Any]:
    """``("batches", 3)`` -> ``Batch(3)``: what goes to a rank by pickle is plain."""
    from determined.pytorch import Batch, Epoch

    kinds = {"batches": Batch, "epochs": Epoch}
    return {k: kinds[v[0]](v[1]) if isinstance(v, tuple) else v for k, v in fit.items()}


def test_epochs_are_real_epochs(one_rank: Ranks, tmp_path: Path) -> None:
    """Each with its own number in the callbacks and in ``train_batch``; what is due comes after its batch."""
    [(calls, batches)] = one_rank.run(
        train,
        str(tmp_path),
        max_length=("epochs", 2),
        validation_period=("epochs", 1),
        checkpoint_policy="none",
        reporting_period=("batches", 4),
    )
    assert batches == [(i // BATCHES_PER_EPOCH, i) for i in range(2 * BATCHES_PER_EPOCH)]
    first = [("epoch start", 0), *(("batch", i) for i in range(4)), "report", ("batch", 4), ("epoch end", 0)]
    second = [("epoch start", 1), *(("batch", i) for i in range(5, 8)), "report", ("batch", 8), ("batch", 9)]
    assert calls == [*first, "validation", *second, ("epoch end", 1), "report", "validation", "checkpoint"]


def test_what_is_reported(
    two_ranks: Ranks, tmp_path: Path, metrics_of: Callable[[Path, str], list[dict[str, Any]]]
) -> None:
    """Numbers only: throughput over replicas, not ranks; the ranks' memory; learning rate and gradient norm."""
    two_ranks.run(train, str(tmp_path), max_length=("batches", 4), reporting_period=("batches", 2))
    for report in metrics_of(tmp_path, "training"):
        assert report["lr"] == 0.01
        assert report["grad_norm"] > 0
        assert report["tokens_per_second"] == pytest.approx(3 * report["samples_per_second"])
        assert 1 / 16 < report["peak_memory_gib_min"] <= report["peak_memory_gib"] < 64
        assert {type(value) for value in report.values()} <= {int, float}
        assert "epochs" not in report
    assert [r["batches"] for r in metrics_of(tmp_path, "training")] == [2, 4]


@pytest.mark.parametrize(
    ("searcher", "fit", "names"),
    [
        (None, {}, {"batches", "validation_loss"}),
        (None, {"validation_period": ("epochs", 1)}, {"batches", "epochs", "validation_loss"}),
        ({"time_metric": "epochs"}, {}, {"batches", "epochs", "validation_loss"}),
        ({"time_metric": "batches"}, {}, {"batches", "validation_loss"}),
    ],
    ids=["in-batches", "validated-by-epoch", "searched-by-epoch", "searched-by-batch"],
)
def test_epochs_are_reported_where_something_is_counted_in_them(
    searcher: dict[str, Any] | None,
    fit: dict[str, Any],
    names: set[str],
    one_rank: Ranks,
    tmp_path: Path,
    metrics_of: Callable[[Path, str], list[dict[str, Any]]],
) -> None:
    """The web UI orders metrics by name, and ``epochs``, always 0, would be the first."""
    one_rank.run(train, str(tmp_path), searcher=searcher, max_length=("batches", 6), **fit)
    for report in metrics_of(tmp_path, "validation"):
        assert report.keys() == names
        assert report.get("epochs", 1) == 1
    assert all("epochs" not in report for report in metrics_of(tmp_path, "training"))


def test_one_trace_for_each_scheduled_window(two_ranks: Ranks, tmp_path: Path) -> None:
    """Two windows of two batches, on two ranks; a batch is one step of the profiler."""
    two_ranks.run(train, str(tmp_path), profile=True, max_length=("batches", 10))
    traces = sorted((tmp_path / "tensorboard").glob("*.pt.trace.json"))
    assert len(traces) == 4
    for trace in traces:
        events = json.loads(trace.read_text())["traceEvents"]
        steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
        assert steps in ({"ProfilerStep#2", "ProfilerStep#3"}, {"ProfilerStep#6", "ProfilerStep#7"})


def test_tensorboard_has_the_scalars_under_the_names_of_the_metrics(one_rank: Ranks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one_rank.run(train, str(tmp_path), max_length=("batches", 4), reporting_period=("batches", 2))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    speed = {"samples_per_second", "memory_allocated_gb", "memory_reserved_gb"}
    training = {f"training/{name}" for name in {"loss", "lr", "grad_norm", *speed}}
    assert training | {"validation/validation_loss"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("training/loss")] == [2, 4]
    assert [event.step for event in events.Scalars("validation/validation_loss")] == [4]


@pytest.mark.parametrize(
    ("policy", "smaller_is_better", "expected"),
    [("all", True, [2, 4, 6]), ("none", True, [6]), ("best", True, [2, 4, 6]), ("best", False, [2, 6])],
)
def test_checkpoint_policies_work_without_a_cluster(
    one_rank: Ranks, tmp_path: Path, policy: str, smaller_is_better: bool, expected: list[int]
) -> None:
    """The loss falls: by ``smaller_is_better`` each validation is the best so far, or the first stays it."""
    searcher = {"metric": "validation_loss", "smaller_is_better": smaller_is_better}
    one_rank.run(
        train,
        str(tmp_path),
        searcher=searcher,
        max_length=("batches", 6),
        validation_period=("batches", 2),
        checkpoint_policy=policy,
    )
    assert sorted(c.steps_completed for c in checkpoints_in(tmp_path / "checkpoints")) == expected


def test_the_best_checkpoint_is_kept_whichever_period_saved_it(one_rank: Ranks, tmp_path: Path) -> None:
    """The first validation stays the best; what falls due with it is its checkpoint, and is never pruned."""
    one_rank.run(
        train,
        str(tmp_path),
        searcher={"metric": "validation_loss", "smaller_is_better": False},
        max_length=("batches", 8),
        validation_period=("batches", 2),
        checkpoint_period=("batches", 2),
        checkpoint_policy="none",
        save_total_limit=2,
    )
    assert sorted(c.steps_completed for c in checkpoints_in(tmp_path / "checkpoints")) == [2, 8]


def test_damaged_checkpoints_count_and_are_pruned_first(one_rank: Ranks, tmp_path: Path) -> None:
    """Found as the run goes on from the one before them; without a limit they stay, as any other does."""
    fit = {"checkpoint_period": ("batches", 2), "checkpoint_policy": "none"}
    one_rank.run(train, str(tmp_path), max_length=("batches", 6), **fit)
    newest, good, _ = checkpoints_in(tmp_path / "checkpoints")
    (newest.path / "trial_state.json").write_text("{}")
    one_rank.run(
        train,
        str(tmp_path),
        max_length=("batches", 8),
        latest_checkpoint=good.uuid,
        save_total_limit=3,
        **fit,
    )
    assert not newest.path.exists()
    left = checkpoints_in(tmp_path / "checkpoints")
    assert [checkpoint.steps_completed for checkpoint in left] == [8, 6, 4]
    assert [damage_of(checkpoint.path) for checkpoint in left] == [None] * 3


def test_checkpoints_that_another_command_deleted_do_not_count(one_rank: Ranks, tmp_path: Path) -> None:
    fit = {"checkpoint_period": ("batches", 2), "checkpoint_policy": "none"}
    one_rank.run(train, str(tmp_path), max_length=("batches", 8), **fit)
    newest, *between, _ = checkpoints_in(tmp_path / "checkpoints")
    for each in between:
        shutil.rmtree(each.path)
    fit |= {"latest_checkpoint": newest.uuid, "save_total_limit": 3}
    one_rank.run(train, str(tmp_path), max_length=("batches", 10), **fit)
    assert [each.steps_completed for each in checkpoints_in(tmp_path / "checkpoints")] == [10, 8, 2]


# ------------------------------------------------------------------------- against Determined's own loop


def train_theirs(run_dir: str, **fit: Any) -> Any:
    """In a rank: the same trial under Determined's own context and Trainer, once its device is made a CPU."""
    from determined.pytorch import deepspeed as det_ds

    from determined_ds import open_context
    from tests.benchmarks.parts import determined_context

    hparams = hyperparameters()
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as ours:
        context = determined_context(ours, hparams)
        trial = trial_class()(context)
        det_ds.Trainer(trial, context).fit(**_units(fit), checkpoint_policy="none")
        return trial.noting.calls, trial.batches


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (arguments of fit, what Determined 0.38.1 does, what the documentation says and ours does)
    "length 11, validation every 5": (
        {
            "max_length": ("batches", 11),
            "validation_period": ("batches", 5),
            "reporting_period": ("batches", 3),
        },
        {"trained": 12, "validations": 1, "epochs": {0}},
        {"trained": 11, "validations": 3, "epochs": {0, 1, 2}},
    ),
    "length 7, reports every 10": (
        {"max_length": ("batches", 7), "reporting_period": ("batches", 10)},
        {"trained": 10, "validations": 1, "epochs": {0}},
        {"trained": 7, "validations": 1, "epochs": {0, 1}},
    ),
    "two epochs": (
        {
            "max_length": ("epochs", 2),
            "validation_period": ("epochs", 1),
            "reporting_period": ("batches", 100),
        },
        {"trained": 10, "validations": 2, "epochs": {0}},
        {"trained": 10, "validations": 2, "epochs": {0, 1}},
    ),
}


def summary(calls: list[Any], batches: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "trained": len(batches),
        "validations": calls.count("validation"),
        "epochs": {epoch for epoch, _ in batches},
    }


@pytest.mark.parametrize("case", CASES)
def test_where_determineds_own_loop_differs(one_rank: Ranks, tmp_path: Path, case: str) -> None:
    """The claim that ours is right where theirs is not, held against the installed Determined.

    Should this fail because theirs has been fixed, say so in the documentation.
    """
    fit, expected_theirs, expected_ours = CASES[case]
    [theirs] = one_rank.run(train_theirs, str(tmp_path / "theirs"), **fit)
    [ours] = one_rank.run(train, str(tmp_path / "ours"), **fit)
    assert {"theirs": summary(*theirs), "ours": summary(*ours)} == {
        "theirs": expected_theirs,
        "ours": expected_ours,
    }


# --------------------------------------------------------------------------------- checkpoints of others


def go_on_from_theirs(run_dir: str) -> Any:
    """In a rank: train four batches with Determined's loop, then go on from its checkpoint with ours to six."""
    from determined.pytorch import Batch
    from determined.pytorch import deepspeed as det_ds

    from determined_ds import Trainer, open_context
    from tests.benchmarks.parts import determined_context

    hparams = hyperparameters()
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        theirs = determined_context(context, hparams, checkpoint_storage=f"{run_dir}/checkpoints")
        trained = trial_class()(theirs)
        det_ds.Trainer(trained, theirs).fit(
            max_length=Batch(4), reporting_period=Batch(4), checkpoint_policy="none"
        )
        [uuid] = os.listdir(f"{run_dir}/checkpoints")
        trial = trial_class()(context)
        Trainer(trial, context).fit(max_length=Batch(6), latest_checkpoint=uuid)
        return [batch for _, batch in trial.batches]


def test_a_checkpoint_of_determineds_own_layout_loads(one_rank: Ranks, tmp_path: Path) -> None:
    """It has no manifest, and is said to be unverified."""
    assert one_rank.run(go_on_from_theirs, str(tmp_path)) == [[4, 5]]
    assert "has no manifest.json: its files are unverified" in one_rank.said(0)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


def load_evil(run_dir: str, name: str) -> str:
    """In a rank: plant an object that runs a command in a checkpoint's file, seal it again, and load it."""
    import torch
    from determined.pytorch import Batch

    from determined_ds import Trainer, TrainingError, open_context
    from determined_ds.protocol.checkpoint_files import (
        METADATA,
        files_of,
        fingerprint,
        write_manifest,
    )

    with open_context(hparams=hyperparameters(), run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_class()(context)
        Trainer(trial, context).fit(max_length=Batch(2))
        checkpoint = checkpoints_in(Path(run_dir) / "checkpoints")[0]
        torch.save({"module": Evil(f"{run_dir}/ran")}, checkpoint.path / name)
        metadata = json.loads((checkpoint.path / METADATA).read_text())
        marks = {file: fingerprint(checkpoint.path / file) for file in files_of(checkpoint.path)}
        write_manifest(checkpoint.path, marks, metadata)
        try:
            Trainer(trial, context).fit(max_length=Batch(4), latest_checkpoint=checkpoint.uuid)
        except TrainingError as error:
            return str(error)
    return "it was loaded"


@pytest.mark.parametrize("name", ["det_state_dict_rank0.pth", "model0/settings_stage0.pt"])
def test_loading_executes_nothing(one_rank: Ranks, tmp_path: Path, name: str) -> None:
    """Neither in our own file nor in DeepSpeed's, and though the manifest vouches for it."""
    [said] = one_rank.run(load_evil, str(tmp_path), name)
    assert not (tmp_path / "ran").exists()
    assert "os" in said or "posix" in said
    assert "checkpoint" in said
