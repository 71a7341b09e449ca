"""A machine's figures: written and read, merged, found by the hardware, ignored where they are of another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.accelerator import Accelerator
from determined_ds.devices import hardware_here
from determined_ds.errors import ConfigError
from determined_ds.protocol.machine_figures import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    DEVICE,
    Bandwidth,
    BenchRun,
    Collective,
    Hardware,
    HeldStates,
    Peak,
    TimedCheckpoint,
    TimedStep,
    Transfer,
    bus_factor,
)
from determined_ds.protocol.machine_file import (
    LOCATION,
    MachineFigures,
    figures_of,
    machine_path,
    read_machine,
    write_machine,
)

HERE = Hardware(accelerator="cpu", device="A CPU", num_devices=2, cores=2, host_memory_bytes=2**34)
GPUS = Hardware(
    accelerator="cuda",
    device="NVIDIA H200",
    num_devices=8,
    cores=64,
    host_memory_bytes=2**40,
    device_memory_bytes=2**37,
)
STEP = TimedStep(
    model="GPT-2",
    num_parameters=10,
    strategy="zero1",
    precision="fp32",
    ranks=2,
    micro_batch_size=4,
    samples=8,
    tokens_per_sample=128,
    step_seconds=0.25,
    fast_step_seconds=0.2,
    slow_step_seconds=0.3,
    flops=1e9,
)
CHECKPOINT = TimedCheckpoint(
    storage="run directory",
    strategy="zero1",
    ranks=2,
    size_bytes=2**20,
    write_seconds=0.5,
    load_seconds=0.25,
)
HELD = HeldStates(
    model="2M",
    num_parameters=2_000_000,
    strategy="zero2",
    precision="fp32",
    ranks=2,
    state_bytes=100,
    estimated_state_bytes=95,
)


def all_reduce(ranks: int = 2, latency_s: float = 1e-3) -> Collective:
    sizes = [2**10, 2**16, 2**22]
    factor = bus_factor(ALL_REDUCE, ranks)
    seconds = [latency_s + size * factor / 1e9 for size in sizes]
    return Collective(
        name=ALL_REDUCE,
        ranks=ranks,
        machines=1,
        backend="gloo",
        dtype="float32",
        latency_s=latency_s,
        bus_bytes_per_s=1e9,
        points=tuple(
            Transfer(size_bytes=size, seconds=each, fast_seconds=each, slow_seconds=each)
            for size, each in zip(sizes, seconds, strict=True)
        ),
    )


def measured(bench: str, when: str = "2026-01-02T03:04:05") -> BenchRun:
    return BenchRun(
        bench=bench,
        when=when,
        command="det-ds bench",
        hostname="here",
        ranks=2,
        versions=("torch 2.13.0",),
        wall_seconds=9.5,
    )


WHOLE = MachineFigures(
    hardware=HERE,
    measured=(measured("communication"), measured("training")),
    collectives=(all_reduce(),),
    peaks=(Peak(precision="fp32", ranks=2, threads=1, flops_per_s=9e10),),
    bandwidths=(Bandwidth(place=DEVICE, ranks=2, bytes_per_s=5e9),),
    states=(HELD,),
    steps=(STEP,),
    checkpoints=(CHECKPOINT,),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "below" / "machine.json"
    write_machine(path, WHOLE)
    assert read_machine(path) == WHOLE
    assert figures_of(HERE, path).machine == WHOLE


def test_a_later_measurement_keeps_what_it_does_not_repeat() -> None:
    slower = all_reduce(latency_s=2e-3)
    newer = MachineFigures(
        hardware=HERE,
        measured=(measured("communication", "2026-02-02T00:00:00"),),
        collectives=(slower, all_reduce(4)),
    )
    merged = WHOLE.merged(newer)
    assert merged.collectives == (slower, all_reduce(4))
    assert [(each.bench, each.when[:7]) for each in merged.measured] == [
        ("communication", "2026-02"),
        ("training", "2026-01"),
    ]
    assert dataclasses.replace(merged, collectives=WHOLE.collectives, measured=WHOLE.measured) == WHOLE


class TestWhereItLies:
    def test_each_machine_has_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", "/data")
        assert machine_path(HERE, {}) == Path("/data/determined_ds/cpu-2-x-A-CPU/machine.json")
        assert machine_path(GPUS, {}) == Path("/data/determined_ds/cuda-NVIDIA-H200/machine.json")

    def test_a_variable_names_another_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(LOCATION, str(tmp_path / "ours.json"))
        write_machine(machine_path(HERE), WHOLE)
        assert figures_of(HERE).machine == WHOLE

    def test_nothing_measured(self, tmp_path: Path) -> None:
        found = figures_of(HERE, tmp_path / "machine.json")
        assert (found.machine, found.note) == (None, "")

    def test_of_another_machine(self, tmp_path: Path) -> None:
        write_machine(tmp_path / "machine.json", WHOLE)
        found = figures_of(dataclasses.replace(HERE, cores=4), tmp_path / "machine.json")
        assert found.machine is None
        assert "is of A CPU, 2 cores; this is A CPU, 4 cores" in found.note

    def test_fewer_gpus_of_the_same_kind_are_the_same_machine(self, tmp_path: Path) -> None:
        write_machine(tmp_path / "machine.json", dataclasses.replace(WHOLE, hardware=GPUS))
        found = figures_of(dataclasses.replace(GPUS, num_devices=1, cores=8), tmp_path / "machine.json")
        assert found.machine is not None

    @pytest.mark.parametrize("text", ["", "{", '{"kind": "something else"}', "[]"])
    def test_damaged(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "machine.json"
        path.write_text(text)
        found = figures_of(HERE, path)
        assert found.machine is None
        assert str(path) in found.note
        with pytest.raises(ConfigError, match=r"machine\.json"):
            read_machine(path)

    @pytest.mark.parametrize(
        ("before", "after", "key"),
        [('"cores": 2', '"cores": "two"', "hardware.cores"), ('"cores": 2', '"corse": 2', "hardware.corse")],
    )
    def test_what_is_wrong_is_named(self, before: str, after: str, key: str, tmp_path: Path) -> None:
        path = tmp_path / "machine.json"
        write_machine(path, WHOLE)
        path.write_text(path.read_text().replace(before, after))
        with pytest.raises(ConfigError, match=key):
            read_machine(path)


def test_this_machine_is_always_the_same() -> None:
    accelerator = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)
    assert hardware_here(accelerator) == hardware_here(accelerator)
    assert hardware_here(accelerator).device


class TestSeconds:
    @given(st.sampled_from(COLLECTIVES), st.integers(2, 1024))
    def test_no_rank_sends_more_than_twice_the_whole(self, name: str, ranks: int) -> None:
        assert 0.5 <= bus_factor(name, ranks) < 2

    @pytest.mark.parametrize("point", all_reduce().points)
    def test_a_measured_size_takes_what_was_measured(self, point: Transfer) -> None:
        assert all_reduce().seconds(point.size_bytes) == pytest.approx(point.seconds)

    @given(st.floats(1, 1e12), st.floats(1, 1e12))
    def test_a_larger_one_never_takes_less(self, one: float, other: float) -> None:
        small, large = sorted((one, other))
        assert all_reduce().seconds(small) <= all_reduce().seconds(large) * (1 + 1e-9)

    def test_beyond_what_was_measured_the_bandwidth_decides(self) -> None:
        collective = all_reduce()
        assert collective.seconds(2**40) / collective.seconds(2**39) == pytest.approx(2, rel=0.01)

    def test_more_ranks_at_the_same_bus_bandwidth(self) -> None:
        collective = all_reduce()
        ratio = collective.seconds(2**40, ranks=1024) / collective.seconds(2**40)
        assert ratio == pytest.approx(bus_factor(ALL_REDUCE, 1024), rel=0.01)


def test_the_nearest_number_of_ranks_answers() -> None:
    machine = dataclasses.replace(
        WHOLE,
        collectives=(all_reduce(2), all_reduce(8)),
        peaks=tuple(
            Peak(precision="fp32", ranks=ranks, threads=1, flops_per_s=1e9 * ranks) for ranks in (1, 4)
        ),
    )
    assert machine.collective(ALL_REDUCE, 6) == all_reduce(8)
    assert machine.collective(ALL_GATHER, 2) is None
    assert machine.collective(ALL_REDUCE, 2, machines=2) is None
    assert machine.peak_flops_per_s("fp32", 3) == 4e9
    assert machine.peak_flops_per_s("bf16", 3) is None
    assert machine.bytes_per_s(DEVICE, 1) == 5e9
