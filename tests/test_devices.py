"""What a machine computes on, as it is found without torch; and the threads of ranks that share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from determined_ds import Accelerator, devices
from determined_ds.launch.ranks import environment_of_ranks
from determined_ds.rundir.records import machine_facts

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        (None, CORES),
        (["max 100000"], CORES),
        (["100000 100000"], 1),
        (["150000 100000"], 1),
        (["50000 100000"], 1),  # half a core is one thread
        ([f"{(CORES + 7) * 100000} 100000"], CORES),
        (["-1\n", "100000\n"], CORES),
        (["100000\n", "100000\n"], 1),
    ],
)
def test_a_container_has_no_more_cores_than_it_is_granted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: list[str] | None, cores: int
) -> None:
    """As cgroups of version 2 and 1 say it."""
    files = [tmp_path / f"file{index}" for index in range(len(quota or ["none"]))]
    for file, text in zip(files, quota or [], strict=False):
        file.write_text(text)
    monkeypatch.setattr("determined_ds.rundir.limits.CPU_QUOTAS", (tuple(map(str, files)),))
    assert devices.num_cores() == cores
    assert machine_facts()["cores"] == cores
    assert devices.threads_per_rank(1) == cores
    assert devices.threads_per_rank(cores + 1) == 1


@pytest.mark.parametrize(
    ("shell", "experiment", "threads"),
    [
        ({}, {}, "2"),
        ({"OMP_NUM_THREADS": "5"}, {}, "5"),
        ({"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": None}, "2"),  # which the ranks must not have
    ],
)
def test_ranks_divide_the_cores_of_their_machine_unless_somebody_says_how_many_threads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    shell: dict[str, str],
    experiment: dict[str, str | None],
    threads: str,
) -> None:
    """DeepSpeed's optimizer on the CPU would take all cores in each rank."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "num_cores", lambda: 16)
    gpus = Accelerator(name="cuda", num_devices=8, bf16=True, fp16=True)
    assert environment_of_ranks(8, gpus, tmp_path, experiment)["OMP_NUM_THREADS"] == threads


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU's device node; the program, yet to be written, that says of which kind it is."""
    node = tmp_path / "nvidiactl"
    node.touch()
    monkeypatch.setattr(devices, "GPU_NODES", (str(node),))
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("9.0\n9.0", Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)),
        ("7.5", Accelerator(name="cuda", num_devices=1, bf16=False, fp16=True)),
        ("8.0\n7.5", None),
        ("", None),
        ("[N/A]", None),
        ("NVIDIA-SMI has failed", None),
    ],
)
def test_gpus_are_found_without_torch_or_left_to_it(gpus: Path, said: str, found: Accelerator | None) -> None:
    gpus.write_text(f"#!/bin/sh\necho '{said}'\n")
    gpus.chmod(0o755)
    assert devices.detect_without_torch() == found


def test_where_cuda_does_not_show_all_gpus_torch_is_asked(
    gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.write_text("#!/bin/sh\necho 9.0\n")
    gpus.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert devices.detect_without_torch() is None
