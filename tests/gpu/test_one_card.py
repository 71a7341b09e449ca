"""What one GPU proves by ``det-ds run`` on templates: models, strategies, precision, kills, memory, speed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.command import DET_DS, ROOT, TIMEOUT_S, det_ds_program
from tests.harness.required import skip_or_fail
from tests.memory.estimates import estimate
from tests.package import checkpoints, records

GPU = "cuda"
GIB = 2**30
FIT = "hyperparameters.fit"
OVERWRITE = "hyperparameters.overwrite_deepspeed_args"
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
OFFLOAD = ["hyperparameters.deepspeed_config=experiments/deepspeed/zero3_offload.json"]
PRECISION = {
    "bf16": [f"{OVERWRITE}.bf16.enabled=true"],
    "fp16": [
        f"{OVERWRITE}.bf16.enabled=false",
        f"{OVERWRITE}.fp16.enabled=true",
        f"{OVERWRITE}.fp16.initial_scale_power=12",
    ],
    "compiled": ["hyperparameters.torch_compile=true"],
}
MODELS = ("bert", "causal_lm", "dcgan", "drivable_vit", "gpt2", "vit")
HOST_ADAM = "DeepSpeed compiles the optimizer of the host, and there is no g++"
# Relative. Kernels add in another order each time, and half precision has three digits.
SAME, ALIKE = 0.01, 0.03
MEMORY = 0.2  # of the estimate: what torch's allocator and cuBLAS hold besides, and what a kernel saves


def gpt2(size: str, stage: int, micro_batch: int, **more: Any) -> list[str]:
    """Overrides of ``gpt2/zero3_xl`` for GPT-2 of full size on one card, over sequences of 1024."""
    hyperparameters = {
        "model_size": size,
        "vocab_size": 50304,  # a multiple of 64, as kernels like it
        "dropout": 0.0,
        "activation_checkpoint_interval": 0,
        "zero_stage": stage,
        "global_batch_size": 4 * micro_batch,
        **more,
    }
    sets = [f"hyperparameters.{name}={value}" for name, value in hyperparameters.items()]
    return [*sets, f"{OVERWRITE}.train_micro_batch_size_per_gpu={micro_batch}"]


def length(batches: int, reporting: int = 1, validation: int | None = None) -> list[str]:
    """Overrides for a run of so many batches, with a checkpoint at each validation; at the end alone, if None."""
    period = validation or batches
    return [
        f"{FIT}.max_length.batches={batches}",
        f"{FIT}.validation_period.batches={period}",
        f"{FIT}.checkpoint_period.batches={period}",
        f"{FIT}.reporting_period.batches={reporting}",
    ]


def words_of(template: str, run_dir: Path, sets: list[str], *options: str) -> list[str]:
    """The command line of a template on one slot."""
    changes = [word for override in sets for word in ("--set", override)]
    config = str(ROOT / "experiments" / f"{template}.yaml")
    return ["run", config, str(ROOT), "--run-dir", str(run_dir), "--slots", "1", *changes, *options]


def run(template: str, run_dir: Path, sets: list[str], *options: str) -> str:
    """Run a template on one slot, to its end; what it printed."""
    done = det_ds_program(*words_of(template, run_dir, sets, *options), accelerator=GPU)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def reports(run_dir: Path) -> list[dict[str, Any]]:
    """What it reported of its training, in order."""
    return [metrics for _, metrics in records(run_dir, "training")]


def losses(run_dir: Path) -> list[float]:
    return [float(report["loss"]) for report in reports(run_dir)]


def losses_killed_and_not(template: str, folder: Path) -> tuple[list[float], list[float]]:
    """The losses of a run that is killed after its first checkpoint and resumed, and of one that never stops."""
    sets = length(12, validation=4)
    whole, killed = folder / "whole", folder / "killed"
    run(template, whole, sets)
    process = subprocess.Popen(
        [str(DET_DS), *words_of(template, killed, sets), "--accelerator", GPU],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + TIMEOUT_S
    while not checkpoints(killed) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    if process.poll() is None:  # else it was quicker than this test, and goes on from its end
        os.kill(process.pid, signal.SIGKILL)  # its ranks end with it
    process.wait()
    run(template, killed, sets, "--resume")
    return losses(killed), losses(whole)


def peak_beside_estimate(folder: Path, sets: list[str]) -> tuple[float, float]:
    """GiB that GPT-2 took at most on one slot (on a GPU: in tensors), and that ``check --memory`` had estimated."""
    run("gpt2/zero3_xl", folder / "run", [*length(4), *sets])
    changes = [word for override in sets for word in ("--set", override)]
    found = estimate(ROOT / "experiments/gpt2/zero3_xl.yaml", ROOT, "--slots", 1, *changes)
    given = json.loads((folder / "run/deepspeed_config.json").read_text())
    stage = given["zero_optimization"]["stage"]
    [row] = [
        row
        for row in found["strategies"]
        if row["zero_stage"] == stage and row["pipe_parallel_size"] == 1 and not row["offload_optimizer"]
    ]
    return reports(folder / "run")[-1]["peak_memory_gib"], row["total_bytes"] / GIB


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    """There is one here."""
    if not torch.cuda.is_available():
        skip_or_fail("gpu", "torch finds none here")


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_validates_saves_and_loads(model: str, tmp_path: Path) -> None:
    assert "test passed" in run(f"{model}/const", tmp_path / "run", [], "--test")


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The first losses of GPT-2 in fp32 without ZeRO."""
    run_dir = tmp_path_factory.mktemp("fp32") / "run"
    run("gpt2/zero0", run_dir, [*length(10), f"{OVERWRITE}.bf16.enabled=false"])
    return losses(run_dir)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_descends_the_same_loss(strategy: str, in_fp32: list[float], tmp_path: Path) -> None:
    if strategy.endswith("offload") and not shutil.which("g++"):
        pytest.skip(HOST_ADAM)
    offload = strategy.endswith("offload")
    template, sets = ("const", OFFLOAD) if offload else (strategy, [])
    run(f"gpt2/{template}", tmp_path / "run", [*length(10), *sets])
    assert losses(tmp_path / "run") == pytest.approx(in_fp32, rel=ALIKE)


@pytest.mark.parametrize("change", PRECISION)
def test_every_precision_descends_it_too(change: str, in_fp32: list[float], tmp_path: Path) -> None:
    run("gpt2/zero1", tmp_path / "run", [*length(10), *PRECISION[change]])
    assert losses(tmp_path / "run") == pytest.approx(in_fp32, rel=ALIKE)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_killed_and_resumed_it_goes_on(strategy: str, tmp_path: Path) -> None:
    killed, whole = losses_killed_and_not(f"gpt2/{strategy}", tmp_path)
    assert killed == pytest.approx(whole, rel=SAME)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_what_was_estimated(stage: int, tmp_path: Path) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 20 * GIB:
        pytest.skip("takes a card of 20 GiB")
    peak, estimated = peak_beside_estimate(tmp_path, gpt2("small", stage, 8))
    assert peak == pytest.approx(estimated, rel=MEMORY)


def test_a_recording_leaves_no_floor_under_the_peak_of_memory(tmp_path: Path) -> None:
    """MFU's peak is measured with matrices of hundreds of MiB, before engines are built."""
    peaks = []
    for name, profiled in (("plain", []), ("profiled", [f"{FIT}.profile.wait=2", f"{FIT}.profile.active=2"])):
        run("gpt2/zero0", tmp_path / name, [*length(8), *profiled])
        reports = records(tmp_path / name, "training")
        peaks.append(max(metrics["peak_memory_gib"] for _, metrics in reports))
    assert peaks[1] == pytest.approx(peaks[0], abs=0.05)
