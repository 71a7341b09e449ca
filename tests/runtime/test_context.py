"""The context says how a trial is shared out, and takes what a trial written by hand hands it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.experiment.space.master_random import first_trial_seed
from tests.ranks import ROOT, Ranks

HPARAMS: dict[str, Any] = {
    "global_batch_size": 16,
    "model_width": 3,
    "deepspeed_config": {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    },
    "overwrite_deepspeed_args": {"zero_optimization": {"overlap_comm": True}},
}


@contextlib.contextmanager
def opened(hparams: dict[str, Any] = HPARAMS, **options: Any) -> Iterator[Any]:
    from determined_ds import open_context

    with open_context(hparams=hparams, accelerator="cpu", **options) as context:
        yield context


def engine_of(context: Any) -> Any:
    import deepspeed
    import torch

    model = torch.nn.Linear(2, 1)
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=context.resolved.ds_config
    )[0]


def raised(function: Any, *args: Any) -> str:
    """What a call says when it raises: the kind of error, and its message."""
    try:
        function(*args)
    except BaseException as error:  # as some of Determined's errors are
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------------------------- how it is shared


def shares(hparams: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    with opened(hparams, run_dir=run_dir) as context:
        return {
            "global": context.get_global_batch_size(),
            "per slot": context.get_per_slot_batch_size(),
            "hparams": context.get_hparams(),
            "device": str(context.device),
            "seed": context.get_trial_seed(),
        }


def test_a_replica_has_its_share_of_the_global_batch(two_ranks: Ranks, tmp_path: Path) -> None:
    for share in two_ranks.run(shares, HPARAMS, tmp_path):
        assert (share["global"], share["per slot"], share["device"]) == (16, 8, "cpu")


def test_the_stages_of_a_pipeline_share_one_replica(two_ranks: Ranks, tmp_path: Path) -> None:
    """Determined's own context divides by the slots."""
    pipeline = {
        **HPARAMS,
        "pipe_parallel_size": 2,
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": 0}},
    }
    for share in two_ranks.run(shares, pipeline, tmp_path):
        assert (share["global"], share["per slot"]) == (16, 16)


def test_hyperparameters_are_completed(two_ranks: Ranks, tmp_path: Path) -> None:
    for share in two_ranks.run(shares, HPARAMS, tmp_path):
        hparams = share["hparams"]
        path = Path(hparams.pop("deepspeed_config"))
        expected = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "data_parallel_world_size": 2,
            "pipe_parallel_size": 1,
            "model_parallel_size": 1,
            "sequence_parallel_size": 1,
        }
        given = {key: value for key, value in HPARAMS.items() if key != "deepspeed_config"}
        assert hparams == {**given, **expected}
        assert path == tmp_path / "deepspeed_config.json"
        written = json.loads(path.read_text())
        assert written["train_micro_batch_size_per_gpu"] == 4
        assert written["train_batch_size"] == 16
        assert written["zero_optimization"]["overlap_comm"] is True


def seeds(experiment_seed: int) -> tuple[int, list[float]]:
    import random

    import numpy as np
    import torch

    with opened(exp_conf={"reproducibility": {"experiment_seed": experiment_seed}}) as context:
        return context.get_trial_seed(), [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_every_generator_starts_from_the_seed_of_a_masters_first_trial(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(seeds, 3)
    assert first == second
    assert first[0] == first_trial_seed(3)
    assert two_ranks.run(seeds, 3)[0] == first
    other = two_ranks.run(seeds, 4)[0]
    assert all(one != another for one, another in zip(first[1], other[1], strict=True))


# ------------------------------------------------------------------------------------- a model-parallel unit


def wrap_mpu(when: str) -> list[Any]:
    from determined.pytorch.deepspeed import ModelParallelUnit

    mpu = ModelParallelUnit(
        data_parallel_rank=0,
        data_parallel_world_size=1,
        should_report_metrics=False,
        should_build_data_loader=True,
    )
    with opened() as context:
        engine = engine_of(context)
        if when == "before":
            returned = context.wrap_mpu(mpu)
            context.wrap_model_engine(engine)
        else:
            context.wrap_model_engine(engine)
            returned = context.wrap_mpu(mpu)
        kept = context._mpu is mpu and returned is mpu
        return [kept, raised(context.wrap_mpu, mpu), context.models == [engine]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_unit_may_be_wrapped_before_the_engine_and_after_it(one_rank: Ranks, when: str) -> None:
    ((kept, again, wrapped),) = one_rank.run(wrap_mpu, when)
    assert kept
    assert wrapped
    assert "twice" in again


def default_units() -> tuple[int, int]:
    from determined_ds import DeepSpeedMPU

    with opened() as context:
        engine = context.wrap_model_engine(engine_of(context))
        made = DeepSpeedMPU(engine.mpu)
        assert made == context._mpu
        return made.data_parallel_rank, made.data_parallel_world_size


def test_without_a_unit_every_rank_is_a_replica(two_ranks: Ranks) -> None:
    assert two_ranks.run(default_units) == [(0, 2), (1, 2)]


# ------------------------------------------------------------------------------------------------ overwrite


def overwrites() -> dict[str, Any]:
    from attrdict import AttrDict

    with opened() as context:
        base = HPARAMS["deepspeed_config"]
        once = context.overwrite(base)
        return {
            "resolved": context.resolved.ds_config,
            "once": once,
            "twice": context.overwrite(once),
            "by path": context.overwrite(context.get_hparams()["deepspeed_config"]),
            "of attributes": context.overwrite(AttrDict(base)),
            "other": context.overwrite(base, {"optimizer": {"params": {"lr": 0.5}}}),
            "wrong": raised(context.overwrite, base, {"train_batch_size": 17}),
        }


def test_overwrite_gives_what_the_engine_is_given_however_often(one_rank: Ranks) -> None:
    (made,) = one_rank.run(overwrites)
    assert made["once"] == made["twice"] == made["by path"] == made["of attributes"] == made["resolved"]
    assert made["once"]["zero_optimization"]["overlap_comm"] is True
    assert type(made["of attributes"]["optimizer"]) is dict


def overwritten_on_two_machines() -> int:
    one_gpu = Accelerator(name="cuda", num_devices=1, bf16=False, fp16=True)
    with opened() as context:
        context._resolved = dataclasses.replace(context.resolved, accelerator=one_gpu, machines=2)
        return int(context.overwrite(HPARAMS["deepspeed_config"])["train_batch_size"])


def test_overwrite_on_two_machines(two_ranks: Ranks) -> None:
    """Each has room for one of the two ranks."""
    assert two_ranks.run(overwritten_on_two_machines) == [16, 16]


def test_overwrite_with_other_arguments(one_rank: Ranks) -> None:
    (made,) = one_rank.run(overwrites)
    assert made["other"]["optimizer"]["params"]["lr"] == 0.5
    assert made["other"]["zero_optimization"]["overlap_comm"] is False
    assert made["wrong"].startswith("ConfigError")
    assert "17" in made["wrong"]


def reconciliations() -> list[str]:
    with opened() as context:
        engine = engine_of(context)
        right = raised(context.reconcile_ds_config, engine._config)
        wrong = {
            "train_batch_size": 15,
            "train_micro_batch_size_per_gpu": 5,
            "gradient_accumulation_steps": 3,
        }
        return [right, raised(context.reconcile_ds_config, wrong)]


def test_an_engine_that_disagrees_is_refused_with_all_of_it(one_rank: Ranks) -> None:
    ((right, wrong),) = one_rank.run(reconciliations)
    assert right == ""
    assert wrong.startswith("ConfigError")
    for key, value, expected in (
        ("train_batch_size", 15, 16),
        ("train_micro_batch_size_per_gpu", 5, 8),
        ("gradient_accumulation_steps", 3, 2),
    ):
        assert f"{key} = {value}: the engine's is not {expected}" in wrong
    assert "context.overwrite" in wrong


# ------------------------------------------------------------------------------------------------- the rest


def write_tensorboard(run_dir: Path) -> None:
    with opened(run_dir=run_dir) as context:
        writer = context.get_tensorboard_writer()
        writer.add_scalar("mine", 1.5, 0)
        writer.close()


def test_the_tensorboard_writer_writes_to_the_run_directory(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(write_tensorboard, tmp_path)
    (events,) = (tmp_path / "tensorboard").rglob("*tfevents*")
    assert b"mine" in events.read_bytes()


def a_process_alone() -> None:
    """One run of two that are up at the same time, each without a word of how to meet its ranks."""
    import torch.distributed as dist

    with opened() as context:
        print("up", flush=True)
        sys.stdin.readline()
        assert dist.get_world_size() == 1
        context.wrap_model_engine(engine_of(context))
        print("done", flush=True)


@pytest.mark.long("two processes that load torch; launch/ranks/test_group has the ports of a run")
def test_two_runs_share_a_machine() -> None:
    mine = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    command = "from tests.runtime.test_context import a_process_alone; a_process_alone()"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", command],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for run in runs:
            assert run.stdout is not None
            assert any(line == "up\n" for line in run.stdout), "it did not come up beside the other"
        for run in runs:
            output, _ = run.communicate("go on\n", timeout=120)
            assert (run.returncode, output.splitlines()[-1]) == (0, "done")
    finally:
        for run in runs:
            run.kill()
            run.wait()
