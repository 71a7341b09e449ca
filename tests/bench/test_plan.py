"""What will be measured on what is decided before anything starts; what cannot be is refused with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.bench.plan import check_words, decide_where
from determined_ds.config.accelerator import RANKS_PER_CPU_CORE
from determined_ds.devices import num_cores
from determined_ds.errors import ConfigError


def test_two_ranks_of_a_cpu(tmp_path: Path) -> None:
    where = decide_where("communication", slots=None, accelerator="cpu", run_dir=tmp_path / "run")
    assert (where.slots, where.accelerator.name, where.is_chief) == (2, "cpu", True)
    assert str(where) == "2 ranks on 1 machine, cpu"


def test_each_measurement_has_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = decide_where("memory", slots=1, accelerator="cpu", run_dir=None)
    assert where.run_dir.parent == tmp_path / "runs" / "bench_memory"


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (1, r"--slots = 1: a single rank has no peer to communicate with\n  fix: use --slots 2 or more"),
        (
            10**6,
            rf"--slots = 1000000: this machine has .*\n  fix: use --slots {RANKS_PER_CPU_CORE * num_cores()}",
        ),
    ],
)
def test_slots_that_there_are_not(slots: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        decide_where("communication", slots=slots, accelerator="cpu", run_dir=tmp_path)


def test_a_file_in_the_way_of_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        decide_where("communication", slots=2, accelerator="cpu", run_dir=tmp_path / "file" / "run")


class TestUnderAnotherLauncher:
    @pytest.fixture(autouse=True)
    def _torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
        numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 2, "MASTER_PORT": 29500}
        for name, value in numbers.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def test_its_ranks_measure(self, tmp_path: Path) -> None:
        where = decide_where("communication", slots=None, accelerator="cpu", run_dir=tmp_path)
        assert (where.slots, where.is_chief) == (4, False)
        assert str(where) == "4 ranks on 2 machines, cpu"

    def test_it_decides_how_many(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="torchrun has started 4 ranks"):
            decide_where("communication", slots=2, accelerator="cpu", run_dir=tmp_path)

    def test_what_starts_ranks_itself_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="each run starts ranks, and torchrun has started this one"):
            decide_where(
                "training", slots=None, accelerator="cpu", run_dir=tmp_path, alone="each run starts ranks"
            )


def test_words_that_are_not_known_are_all_named() -> None:
    with pytest.raises(ConfigError) as refused:
        check_words("--collectives", ["all_reduce", "gather", "scan"], ("all_reduce", "broadcast"))
    assert [problem.value for problem in refused.value.problems] == ["gather", "scan"]
    with pytest.raises(ConfigError, match="is empty"):
        check_words("--collectives", [], ("all_reduce",))
