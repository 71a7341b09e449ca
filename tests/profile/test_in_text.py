"""A profile for people and for programs: the table in 80 columns, the picture, ``profile.json``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from determined_ds.profile.analysis import analyse
from determined_ds.profile.for_programs import as_json, write_profile
from determined_ds.profile.in_text import parts_table
from determined_ds.profile.step_parts import PARTS, Profile
from determined_ds.protocol.profile_files import traces_in
from determined_ds.report.rank_bars import MOST_RANKS, PART_COLOURS, ink_on, rank_bars_picture, shown_ranks
from determined_ds.report.style import png_of
from tests.profile.written_trace import event, mark, written


def profile(folder: Path, ranks: int = 2) -> Profile:
    """Of steps of 200 ms; rank 1 waits for data."""
    for rank in range(ranks):
        data = 60_000 if rank == 1 else 10_000
        events = [
            mark("data", 0, data),
            mark("forward", data, 80_000),
            mark("backward", 80_000, 180_000),
            event("aten::mm", 80_000, 120_000),
            event("gloo:all_reduce", 100_000, 150_000, cat="user_annotation", tid=5),
        ]
        record = {"ranks": ranks, "zero_stage": 2}
        written(folder, events, [(0, 200_000)], rank=rank, record=record)
    return analyse(traces_in(folder))


def text_of(found: Profile, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(parts_table(found))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_the_table(tmp_path: Path) -> None:
    lines = text_of(profile(tmp_path))
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "A step taken apart: 2 ranks on cpu, ZeRO 2; mean of 1 step"
    rows = {line.split()[0]: line for line in lines[3:] if line}
    assert rows["data"].split() == ["data", "35.0", "17.5", "%", "███▊", "10.0", "(0)", "–", "60.0", "(1)"]
    assert rows["communication"].split()[:3] == ["communication", "30.0", "15.0"]
    assert rows["step"].split() == ["step", "200", "200", "by", "the", "clock"]
    assert "idle" not in rows
    assert "Communication: 20.0 ms more are hidden behind computation (40.0 % of all of it)." in lines
    assert any(line.startswith("other: the rest") for line in lines)


def test_what_ranks_compute_is_a_share_of_their_peak(tmp_path: Path) -> None:
    found = profile(tmp_path)
    counted = [replace(rank, flops=4 * 10**9, peak_flops=80e9) for rank in found.ranks]
    lines = text_of(replace(found, ranks=counted))
    assert "0.02 TFLOP/s a rank: 25.0 % of its measured peak (MFU)." in lines
    assert "MFU" not in "\n".join(text_of(replace(found, ranks=[counted[0], found.ranks[1]])))


def test_of_one_rank_there_is_no_spread(tmp_path: Path) -> None:
    lines = text_of(profile(tmp_path, 1))
    assert "(0)" not in "\n".join(lines)


def test_missing_ranks_are_warned_of(tmp_path: Path) -> None:
    profile(tmp_path, 3)
    (tmp_path / "rank1.json.gz").unlink()
    found = analyse(traces_in(tmp_path))
    assert found.warnings == ("the traces of 1 of 3 ranks are missing (1): means are over the others",)
    assert "warning: the traces of 1 of 3 ranks are missing" in "\n".join(text_of(found))


def test_parts_that_do_not_add_up_to_the_clock_are_warned_of(tmp_path: Path) -> None:
    written(tmp_path, [], [(0, 1000)], record={"steps": [{"batch": 1, "seconds": 0.0011}]})
    [warning] = analyse(traces_in(tmp_path)).warnings
    assert warning == "the parts of rank 0 add up to 1.0 ms a step, and the loop's clock says 1.1 ms"


def test_the_file_for_programs(tmp_path: Path) -> None:
    write_profile(profile(tmp_path), tmp_path / "profile.json")
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["version"] == 1
    assert set(found["seconds"]) == set(PARTS)
    assert found["step_s"] == pytest.approx(0.2)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ranks"][1]["steps"][0]["seconds"]["data"] == pytest.approx(0.06)
    assert found["ranks"][1]["clock_s"] == pytest.approx(0.2)


def test_the_picture_has_a_bar_a_rank_and_a_colour_a_part(tmp_path: Path) -> None:
    figure = rank_bars_picture(as_json(profile(tmp_path)))
    assert figure is not None
    [panel] = figure.axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["rank 0", "rank 1"]
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["data", "forward", "backward", "communication", "other"]
    assert png_of(figure).startswith(b"\x89PNG")


def test_of_very_many_ranks_the_slowest_and_the_quickest_are_drawn() -> None:
    ranks = [{"rank": number, "step_s": 1 + number} for number in range(40)]
    shown = [rank["rank"] for rank in shown_ranks(ranks)]
    assert shown == [*range(MOST_RANKS // 2), *range(40 - MOST_RANKS // 2, 40)]


def test_every_part_has_a_colour_and_without_steps_there_is_no_picture() -> None:
    assert tuple(PART_COLOURS) == tuple(PARTS)
    assert rank_bars_picture({"ranks": [{"rank": 0, "step_s": 0.0, "seconds": {}}]}) is None


def test_numbers_can_be_read_on_their_colours() -> None:
    assert ink_on("#ffffff") != ink_on("#000000")
