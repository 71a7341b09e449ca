"""Tables of 80 columns and pictures of what was measured; figures are kept beside those of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from determined_ds.bench.charts import picture_of
from determined_ds.bench.figure_lines import lines_of
from determined_ds.bench.figures_kept import check_kept, keep
from determined_ds.errors import ConfigError
from determined_ds.protocol.machine_figures import Peak
from determined_ds.protocol.machine_file import LOCATION, MachineFigures, read_machine, write_machine
from tests.bench import making

MADE: dict[str, Callable[[], MachineFigures]] = {
    "communication": making.communication,
    "memory": making.memory,
    "training": making.training,
    "checkpoint": making.checkpoint,
}


@pytest.mark.parametrize("bench", MADE)
def test_tables_fit_80_columns(bench: str) -> None:
    lines = lines_of(MADE[bench]())
    assert max(map(len, lines)) <= 80
    assert len(lines) > 5


def test_every_size_of_a_collective_is_shown() -> None:
    text = "\n".join(lines_of(making.communication()))
    assert "all_reduce: 2 ranks on 1 machine, gloo, float32" in text
    assert "  fit: 0.100 ms + bytes at a busbw of 1.00 GB/s; off by 0% (median)" in text
    [line] = [line for line in text.splitlines()[:20] if line.lstrip().startswith("64 KiB")]
    assert line.split()[2:] == ["0.166", "0.156–0.266", "396", "MB/s", "0.176", "900", "MB/s"]
    assert "all_to_all is not offered by gloo" in text


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (
            "memory",
            ["36x1280,", "774M", "zero1", "11.5", "10.8", "-6.2", "%", "14.4", "13.7", "-5.0", "%"],
        ),
        ("memory", ["36x1280,", "774M", "zero3_offload", "–", "–", "–", "14.4", "13.7", "-5.0", "%"]),
        ("training", ["12x768,", "124M", "4", "400", "±15%", "20.0", "20,480", "5.00G", "2.7", "%"]),
        ("checkpoint", ["written", "at", "once", "2.00", "537", "MB/s", "1.60x"]),
        ("checkpoint", ["loaded", "15.0", "71.6", "MB/s", "–"]),
    ],
)
def test_a_line(bench: str, words: list[str]) -> None:
    assert words in [line.split() for line in lines_of(MADE[bench]())]


@pytest.mark.parametrize("bench", MADE)
def test_each_kind_has_a_picture(bench: str) -> None:
    machine = MADE[bench]()
    assert (picture_of(machine, bench) or b"").startswith(b"\x89PNG")
    assert picture_of(MachineFigures(hardware=machine.hardware), bench) is None


class TestKept:
    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv(LOCATION, str(tmp_path / "data" / "machine.json"))
        (tmp_path / "run").mkdir()
        return tmp_path / "data" / "machine.json"

    def test_beside_other_kinds(self, file: Path, tmp_path: Path) -> None:
        peak = Peak(precision="fp32", ranks=2, threads=1, flops_per_s=1e11)
        before = MachineFigures(
            hardware=making.HARDWARE, measured=(making.signed("training"),), peaks=(peak,)
        )
        write_machine(file, before)
        path, note = keep(making.communication(), tmp_path / "run")
        assert (path, note) == (file, "")
        kept = read_machine(file)
        assert kept.peaks == (peak,)
        assert kept.collectives == making.communication().collectives
        assert {each.name for each in (tmp_path / "run").iterdir()} == {"machine.json", "communication.png"}
        assert read_machine(tmp_path / "run" / "machine.json") == making.communication()

    def test_what_is_damaged_is_replaced_with_a_note(self, file: Path, tmp_path: Path) -> None:
        file.parent.mkdir()
        file.write_text("{")
        _, note = keep(making.communication(), tmp_path / "run")
        assert note.startswith("replaced, since it was ignored: is not JSON")
        assert read_machine(file) == making.communication()

    def test_where_it_cannot_be_written_is_known_before(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=f"fix: export {LOCATION}"):
            check_kept(tmp_path / "file" / "machine.json")
