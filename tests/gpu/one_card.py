"""What is proved on one card, as functions of the accelerator: their way is tested on a CPU, their numbers on a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.harness.command import DET_DS, ROOT, TIMEOUT_S, det_ds_program
from tests.memory.estimates import estimate
from tests.package import checkpoints, records

GIB = 2**30
FIT = "hyperparameters.fit"
OVERWRITE = "hyperparameters.overwrite_deepspeed_args"
# Dense bf16 operations a second, by the name that CUDA gives a card; the first that is part of it counts.
# Source: NVIDIA's data sheets, without sparsity.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}


STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
PRECISION = {
    "bf16": [f"{OVERWRITE}.bf16.enabled=true"],
    "fp16": [
        f"{OVERWRITE}.bf16.enabled=false",
        f"{OVERWRITE}.fp16.enabled=true",
        f"{OVERWRITE}.fp16.initial_scale_power=12",
    ],
    "compiled": ["hyperparameters.torch_compile=true"],
}


def gpt2(size: str, stage: int, micro_batch: int, **more: Any) -> list[str]:
    """Overrides of ``gpt2/zero3_xl`` for GPT-2 of full size on one card, over sequences of 1024."""
    hyperparameters = {
        "model_size": size,
        "vocab_size": 50304,  # a multiple of 64, as kernels like it
        "dropout": 0.0,
        "activation_checkpoint_interval": 0,
        "deepspeed_config": f"experiments/deepspeed/zero{stage}.json",
        "global_batch_size": 4 * micro_batch,
        **more,
    }
    sets = [f"hyperparameters.{name}={value}" for name, value in hyperparameters.items()]
    return [*sets, f"{OVERWRITE}.train_micro_batch_size_per_gpu={micro_batch}"]


def to_nvme(folder: Path) -> list[str]:
    """Overrides of ``gpt2/zero3_offload`` for a disk instead of host memory."""
    return [
        f"{OVERWRITE}.zero_optimization.{section}.{key}={value}"
        for section in ("offload_optimizer", "offload_param")
        for key, value in {"device": "nvme", "nvme_path": str(folder)}.items()
    ]


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


def run(template: str, run_dir: Path, accelerator: str, sets: list[str], *options: str) -> str:
    """Run a template on one slot, to its end; what it printed."""
    done = det_ds_program(*words_of(template, run_dir, sets, *options), accelerator=accelerator)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def reports(run_dir: Path) -> list[dict[str, Any]]:
    """What it reported of its training, in order."""
    return [metrics for _, metrics in records(run_dir, "training")]


def losses(run_dir: Path) -> list[float]:
    return [float(report["loss"]) for report in reports(run_dir)]


def losses_killed_and_not(
    template: str, folder: Path, accelerator: str, more: list[str] | None = None
) -> tuple[list[float], list[float]]:
    """The losses of a run that is killed after its first checkpoint and resumed, and of one that never stops."""
    sets = [*length(12, validation=4), *(more or [])]
    whole, killed = folder / "whole", folder / "killed"
    run(template, whole, accelerator, sets)
    process = subprocess.Popen(
        [str(DET_DS), *words_of(template, killed, sets), "--accelerator", accelerator],
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
    run(template, killed, accelerator, sets, "--resume")
    return losses(killed), losses(whole)


def peak_beside_estimate(folder: Path, accelerator: str, sets: list[str]) -> tuple[float, float]:
    """GiB that GPT-2 took at most on one slot (on a GPU: in tensors), and that ``check --memory`` had estimated."""
    run("gpt2/zero3_xl", folder / "run", accelerator, [*length(4), *sets])
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


def tokens_per_second(run_dir: Path) -> float:
    """Of a run: the median of its reports, the first two left out, in which kernels are compiled and chosen."""
    rates = sorted(report["tokens_per_second"] for report in reports(run_dir)[2:])
    return float(rates[len(rates) // 2])


def flops_per_token(num_parameters: int, num_layers: int, hidden_size: int, sequence_length: int) -> float:
    """Of a transformer's forward and backward pass, without what is computed again.

    Args:
        num_parameters: That multiply: those of positions do not.
        num_layers: Blocks.
        hidden_size: Width.
        sequence_length: Tokens that attend to one another; all of them, as is the custom, not the half behind.

    Source: PaLM, arXiv 2204.02311, appendix B.
    """
    return 6.0 * num_parameters + 12.0 * num_layers * hidden_size * sequence_length


def peak_flops(card: str) -> float | None:
    """Of a card by its name; None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in card), None)
