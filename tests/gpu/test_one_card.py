"""What one GPU proves, in about ten minutes: models, strategies, precision, kernels, offload, kills, memory, speed.

Everything is run as a user runs it, by ``det-ds run`` on a template. Where there is no GPU, all of it is skipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.gpu.one_card import (
    FIT,
    GIB,
    OVERWRITE,
    PRECISION,
    STRATEGIES,
    flops_per_token,
    gpt2,
    length,
    losses,
    losses_killed_and_not,
    peak_beside_estimate,
    peak_flops,
    run,
    to_nvme,
    tokens_per_second,
)
from tests.harness.required import skip_or_fail
from tests.package import records

GPU = "cuda"
MODELS = (
    "bert/const",
    "causal_lm/const",
    "causal_lm/lora",
    "dcgan/const",
    "drivable_vit/const",
    "gpt2/const",
    "vit/const",
)
HOST_ADAM = "DeepSpeed compiles the optimizer of the host, and there is no g++"
# Relative. Kernels add in another order each time, and half precision has three digits.
SAME, ALIKE = 0.01, 0.03
MEMORY = 0.2  # of the estimate: what torch's allocator and cuBLAS hold besides, and what a kernel saves
MFU = 0.45


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    """There is one here."""
    if not torch.cuda.is_available():
        skip_or_fail("gpu", "torch finds none here")


@pytest.mark.parametrize("template", MODELS)
def test_every_model_trains_validates_saves_and_loads(template: str, tmp_path: Path) -> None:
    assert "test passed" in run(template, tmp_path / "run", GPU, [], "--test")


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The first losses of GPT-2 in fp32 without ZeRO."""
    run_dir = tmp_path_factory.mktemp("fp32") / "run"
    run("gpt2/zero0", run_dir, GPU, [*length(10), f"{OVERWRITE}.bf16.enabled=false"])
    return losses(run_dir)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_descends_the_same_loss(strategy: str, in_fp32: list[float], tmp_path: Path) -> None:
    if strategy.endswith("offload") and not shutil.which("g++"):
        pytest.skip(HOST_ADAM)
    run(f"gpt2/{strategy}", tmp_path / "run", GPU, length(10))
    assert losses(tmp_path / "run") == pytest.approx(in_fp32, rel=ALIKE)


@pytest.mark.parametrize("change", PRECISION)
def test_every_precision_and_kernel_descends_it_too(
    change: str, in_fp32: list[float], tmp_path: Path
) -> None:
    run("gpt2/zero1", tmp_path / "run", GPU, [*length(10), *PRECISION[change]])
    assert losses(tmp_path / "run") == pytest.approx(in_fp32, rel=ALIKE)


def test_offload_to_nvme_descends_it_too(in_fp32: list[float], tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not shutil.which("g++") or not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip(
            "DeepSpeed's async_io cannot be built here: it takes g++ and libaio (apt install libaio-dev)"
        )
    (tmp_path / "nvme").mkdir()
    run("gpt2/zero3_offload", tmp_path / "run", GPU, [*length(10), *to_nvme(tmp_path / "nvme")])
    assert losses(tmp_path / "run") == pytest.approx(in_fp32, rel=ALIKE)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_killed_and_resumed_it_goes_on(strategy: str, tmp_path: Path) -> None:
    killed, whole = losses_killed_and_not(f"gpt2/{strategy}", tmp_path, GPU)
    assert killed == pytest.approx(whole, rel=SAME)


def card_with(needed_gib: int) -> str:
    """The card's name; skips where it has less memory."""
    card = torch.cuda.get_device_properties(0)
    if card.total_memory < needed_gib * GIB:
        pytest.skip(f"takes a card of {needed_gib} GiB, and {card.name} has {card.total_memory / GIB:.0f}")
    return str(card.name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_what_was_estimated(stage: int, tmp_path: Path) -> None:
    card_with(20)
    peak, estimated = peak_beside_estimate(tmp_path, GPU, gpt2("small", stage, 8))
    assert peak == pytest.approx(estimated, rel=MEMORY)


def test_a_recording_leaves_no_floor_under_the_peak_of_memory(tmp_path: Path) -> None:
    """MFU's peak is measured with matrices of hundreds of MiB, before engines are built."""
    peaks = []
    for name, profiled in (("plain", []), ("profiled", [f"{FIT}.profile.wait=2", f"{FIT}.profile.active=2"])):
        run("gpt2/zero0", tmp_path / name, GPU, [*length(8), *profiled])
        reports = records(tmp_path / name, "training")
        peaks.append(max(metrics["peak_memory_gib"] for _, metrics in reports))
    assert peaks[1] == pytest.approx(peaks[0], abs=0.05)


@pytest.mark.parametrize(
    ("size", "micro_batch", "needed_gib", "shape"),
    [
        ("small", 16, 30, (123_689_472, 12, 768)),
        ("xl", 8, 70, (1_556_048_000, 48, 1600)),
    ],
)
def test_a_card_is_used(
    size: str, micro_batch: int, needed_gib: int, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    """Model FLOPS utilization, on a machine that does nothing else."""
    peak = peak_flops(card_with(needed_gib))
    if peak is None:
        pytest.skip("the card's peak is not known here: add it to PEAK_FLOPS")
    sets = gpt2(size, 1, micro_batch, torch_compile="true")
    run("gpt2/zero3_xl", tmp_path / "run", GPU, [*length(40, reporting=5), *sets])
    found = tokens_per_second(tmp_path / "run") * flops_per_token(*shape, 1024) / peak
    assert found >= MFU
