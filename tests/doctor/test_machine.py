"""What is shared and granted: memory, shared memory, files, disk, clock, interfaces."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from determined_ds.doctor.diagnosis import Diagnosis
from determined_ds.doctor.limits import (
    check_clock,
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from determined_ds.doctor.network import _of_nccl, check_network
from determined_ds.doctor.surroundings import Host
from determined_ds.memory.units import GIB, MIB

# ------------------------------------------------------------------------------------- shared memory


def test_shared_memory_is_judged_by_ranks_and_the_workers_of_their_loaders(
    small_disk: Callable[[int], Path],
) -> None:
    docker = Host(shared_memory=small_disk(64 * MIB))
    assert check_shared_memory(docker, ranks=1, workers=0).state == "ok"
    few = check_shared_memory(docker, ranks=2, workers=2)
    assert (few.state, few.needed) == ("warning", "384 MiB for 2 ranks of 2 workers")
    assert "docker run --shm-size 8g, resources.shm_size on a cluster" in few.fix
    tiny = check_shared_memory(Host(shared_memory=small_disk(MIB)), ranks=1, workers=0)
    assert (tiny.state, "1 MiB of 1 MiB are free" in tiny.found) == ("missing", True)


def test_without_shared_memory_that_is_said(tmp_path: Path) -> None:
    finding = check_shared_memory(Host(shared_memory=tmp_path / "none"), ranks=1, workers=0)
    assert (finding.state, finding.fix) == ("missing", "mount a tmpfs there")


# ------------------------------------------------------------------------------------- memory and files


@pytest.mark.parametrize(("limit", "state"), [("max", "ok"), (str(GIB), "warning"), (str(2**62), "ok")])
def test_memory_is_what_the_container_may_have(tmp_path: Path, limit: str, state: str) -> None:
    if psutil.virtual_memory().available < 2 * GIB:
        pytest.skip("this machine has not the memory of two ranks")
    file = tmp_path / "memory.max"
    file.write_text(f"{limit}\n")
    assert check_memory(ranks=2, limit_files=(str(file), str(tmp_path / "none"))).state == state


@pytest.mark.parametrize(
    ("limits", "state"),
    [((1024, 2**20), "ok"), ((256, 1024), "warning"), ((1024, resource.RLIM_INFINITY), "ok")],
)
def test_open_files_are_those_that_a_run_may_ask_for(limits: tuple[int, int], state: str) -> None:
    finding = check_open_files(limits=limits)
    assert finding.state == state
    assert bool(finding.fix) is (state == "warning")


# ------------------------------------------------------------------------------------- the run directory


def test_a_run_directory_wants_room(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    full = check_disk(Host(run_dir=small_disk(4 * MIB) / "runs/a"))
    assert (full.state, "fit.save_total_limit" in full.fix) == ("missing", True)
    assert check_disk(Host(run_dir=tmp_path / "not/there/yet")).found.endswith(f"are free in {tmp_path}")


def test_the_clock_of_the_file_system_is_compared_and_nothing_is_left_there(tmp_path: Path) -> None:
    assert check_clock(Host(run_dir=tmp_path)).state == "ok"
    for ahead, words in ((-3600, "ahead of"), (3600, "behind")):
        skewed = check_clock(Host(run_dir=tmp_path, clock=lambda ahead=ahead: time.time() + ahead))
        assert skewed.state == "warning"
        assert f" s {words} this machine" in skewed.found
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_cannot_be_written_to_is_said() -> None:
    finding = check_clock(Host(run_dir=Path("/proc/runs")))
    assert (finding.state, "cannot be written to" in finding.found) == ("missing", True)


# ------------------------------------------------------------------------------------- interfaces


def look(**environment: str) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in check_network(Host(environment=environment))}


def test_a_variable_names_an_interface_that_is_here() -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert look(**{variable: "lo"})[variable].state == "ok"
        absent = look(**{variable: "ib9"})[variable]
        assert (absent.state, absent.fix.startswith(f"unset {variable}, or name one of ")) == (
            "missing",
            True,
        )


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("^docker,lo", ["eth0", "eth1"]),
        ("^=eth1", ["docker0", "eth0", "lo"]),
        ("ib,docker", ["docker0"]),
    ],
)
def test_nccl_takes_prefixes(said: str, chosen: list[str]) -> None:
    assert _of_nccl(said, ["docker0", "eth0", "eth1", "lo"]) == chosen


def test_a_machine_that_reaches_no_other_is_told_so() -> None:
    """In a network namespace that has the loopback alone."""
    program = (
        "from determined_ds.doctor.surroundings import Host\n"
        "from determined_ds.doctor.network import check_network\n"
        "[finding] = check_network(Host(environment={}))\n"
        "print(finding.state, finding.found)\n"
    )
    words = ["unshare", "--net", sys.executable, "-c", program]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("a network namespace takes unshare")
    if "unshare" in done.stderr:
        pytest.skip(f"a network namespace takes root: {done.stderr.strip()}")
    assert done.stdout.startswith("warning no route to other machines"), done.stderr
