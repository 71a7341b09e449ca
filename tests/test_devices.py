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
        ([], CORES),
        (["max 100000"], CORES),
        (["50000 100000"], 1),  # half a core is one thread
        (["-1\n", "100000\n"], CORES),
        (["100000\n", "100000\n"], 1),
    ],
)
def test_a_container_has_no_more_cores_than_it_is_granted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: list[str], cores: int
) -> None:
    """As cgroups of version 2 and 1 say it."""
    files = [tmp_path / f"file{index}" for index in range(max(1, len(quota)))]
    for file, text in zip(files, quota, strict=False):
        file.write_text(text)
    monkeypatch.setattr("determined_ds.rundir.limits.CPU_QUOTAS", (tuple(map(str, files)),))
    assert devices.num_cores() == machine_facts()["cores"] == cores
    assert (devices.threads_per_rank(1), devices.threads_per_rank(cores + 1)) == (cores, 1)


@pytest.mark.parametrize(
    ("experiment", "threads"),
    [({}, "5"), ({"OMP_NUM_THREADS": "3"}, "3"), ({"OMP_NUM_THREADS": None}, "2")],
)
def test_ranks_divide_the_cores_of_their_machine_unless_somebody_says_how_many_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experiment: dict[str, str | None], threads: str
) -> None:
    """DeepSpeed's optimizer on the CPU would take all cores in each rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(devices, "num_cores", lambda: 16)
    gpus = Accelerator(name="cuda", num_devices=8, bf16=True, fp16=True)
    assert environment_of_ranks(8, gpus, tmp_path, experiment)["OMP_NUM_THREADS"] == threads
