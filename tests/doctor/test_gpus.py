"""GPUs, their driver and the variable that hides some: as nvidia-smi and torch say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.doctor.diagnosis import Diagnosis
from determined_ds.doctor.gpus import ask_driver, check_gpus
from determined_ds.doctor.imports import Torch
from tests.doctor.programs import machine, nvidia_smi

CUDA13 = Torch(cuda="13.0", gpus=2)
OF_CPUS = Torch()


def look(folder: Path, torch: Torch, **environment: str) -> dict[str, Diagnosis]:
    here = machine(folder, Path("/usr/bin"), Path("/bin"), **environment)
    return {finding.name: finding for finding in check_gpus(here, ask_driver(here), torch)}


@pytest.mark.parametrize(
    ("cuda", "torch", "state", "fix"),
    [
        ("12.4", "13.0", "missing", "install driver 580 or newer, or a torch that is built for CUDA 12"),
        ("12.4", "12.8", "warning", "a driver for CUDA 12.8"),
        ("12.8", "12.4", "ok", ""),
        ("13.0", "12.8", "ok", ""),
    ],
)
def test_a_driver_runs_its_own_cuda_and_older_ones(
    tmp_path: Path, cuda: str, torch: str, state: str, fix: str
) -> None:
    nvidia_smi(tmp_path, cuda=cuda)
    driver = look(tmp_path, Torch(cuda=torch, gpus=2))["driver"]
    assert driver.state == state
    assert fix in driver.fix
    assert torch in driver.needed


def test_a_torch_of_cpus_sees_no_gpu_and_neither_does_one_that_is_hindered(tmp_path: Path) -> None:
    nvidia_smi(tmp_path)
    built = look(tmp_path, OF_CPUS)["gpus"]
    assert (built.state, "torch is built for CPUs" in built.found, "built for CUDA" in built.fix) == (
        "missing",
        True,
        True,
    )
    blind = look(tmp_path, Torch(cuda="12.4"))["gpus"]
    assert (blind.state, "torch sees none" in blind.found) == ("missing", True)


@pytest.mark.parametrize(
    ("said", "state", "told"),
    [
        ("0,1", "ok", ""),
        ("1", "ok", ""),
        ("GPU-0a5c2f1e", "ok", ""),
        ("MIG-6a1e", "ok", ""),
        ("0,2", "missing", "not 2"),
        ("GPU-ffff", "missing", "not GPU-ffff"),
        ("MIG-6a1e,MIG-7b2f", "missing", "CUDA_VISIBLE_DEVICES=MIG-6a1e"),
        ("", "warning", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_visible_devices_are_numbers_or_uuids_that_there_are(
    tmp_path: Path, said: str, state: str, told: str
) -> None:
    nvidia_smi(tmp_path)
    finding = look(tmp_path, CUDA13, CUDA_VISIBLE_DEVICES=said)["CUDA_VISIBLE_DEVICES"]
    assert finding.state == state
    assert told in finding.fix
