"""The files of a comparison's report, and its pictures by themselves."""

from __future__ import annotations

import csv
import io
import stat
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from determined_ds import ConfigError, Results, create_performance_visualizations, load_results
from tests.package import refusal, results_table, write_report
from tests.report.making import MIB, PARTS, comparison, failed, repetition, results, row

PNG = b"\x89PNG\r\n\x1a\n"


def lines_of(found: Results, folder: Path) -> list[dict[str, str]]:
    """results.csv."""
    text = write_report(found, folder, page=False)[1].read_bytes().decode()
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


# ------------------------------------------------------------------------------------------- the files


def test_a_report_is_json_csv_and_a_page_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    write_report(results(failed("earlier")), folder)
    written = write_report(results(*comparison()), folder)
    assert [path.name for path in written] == ["results.json", "results.csv", "report.html"]
    assert sorted(folder.iterdir()) == sorted(written)
    assert load_results(written[0]) == results(*comparison())
    assert not [path for path in written if "earlier" in path.read_text()]


def test_a_report_that_cannot_be_written_whole_is_not_begun(tmp_path: Path) -> None:
    write_report(results(failed("zero1")), tmp_path)
    (tmp_path / "results.csv").unlink()
    (tmp_path / "results.csv").mkdir()
    assert "is a folder" in refusal(lambda: write_report(results(failed("zero2")), tmp_path)).message
    assert load_results(tmp_path / "results.json") == results(failed("zero1"))


def test_csv_has_a_line_for_each_row(tmp_path: Path) -> None:
    found = results(*comparison(), failed("odd", reason='a "b",\r\nc'))
    lines = lines_of(found, tmp_path)
    assert [line["name"] for line in lines] == [each.name for each in found.rows]
    assert [line["status"] for line in lines] == [each.status for each in found.rows]
    measured, missing = lines[0], lines[2]
    assert float(measured["step_median_s"]) == found.rows[0].median_step_seconds
    assert float(measured["samples_per_s"]) == found.rows[0].samples_per_second
    assert int(measured["peak_memory_bytes"]) == found.rows[0].peak_memory_bytes
    assert float(lines[4]["scaling_efficiency"]) == found.scaling_efficiency(found.rows[4])
    assert float(lines[5]["bubble"]) == 0.35
    assert (missing["reason"], missing["step_median_s"]) == ("it asked for 2 GiB", "")
    assert lines[-1]["reason"] == 'a "b", c'


# ------------------------------------------------------------------------------- which row is best for what


def timed(name: str, *steps: float, mib: int = 700, loss: float | str = 3.0) -> dict[str, Any]:
    """A row with a repetition for each step time; its loss is reached in the fifth of ten steps."""
    each = {"losses": [4.0] * 5 + [loss] * 5, "peak_memory_bytes_by_rank": [mib * MIB]}
    return row(name, *(repetition([seconds] * 8, **each) for seconds in steps))


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        (
            [
                timed("fast", 0.10, 0.11, mib=900),
                timed("lean", 0.20, 0.21, mib=500),
                timed("good", 0.30, 0.31, mib=800, loss=2.0),
            ],
            ["speed, time to loss", "memory", "loss"],
        ),
        (
            [timed("zero0", 0.20, 0.22), timed("zero1", 0.21, 0.23), timed("zero2", 0.40, 0.41)],
            ["speed (tied), time to loss (tied)", "speed (tied), time to loss (tied)", ""],
        ),
        ([timed("zero0", 0.200), timed("zero1", 0.204)], ["", ""]),
        ([timed("zero0", 0.200), timed("zero1", 0.220)], ["speed, time to loss", ""]),
        ([timed("zero0", 0.2, loss="NaN"), timed("zero1", 0.2)], ["", ""]),
        ([timed("zero0", 0.2, 0.2)], [""]),
    ],
    ids=["each in one", "spreads that meet", "once, 2 %", "once, 10 %", "a lost loss", "alone"],
)
def test_a_row_is_best_only_where_the_spreads_distinguish_it(
    rows: list[dict[str, Any]], best: list[str], tmp_path: Path
) -> None:
    """Measured once, it must be faster by more than a twentieth."""
    assert [line["best_for"].replace(";", ",") for line in lines_of(results(*rows), tmp_path)] == best


def test_the_table_fits_the_terminal_and_says_why_a_row_has_no_numbers() -> None:
    large = repetition([86_000.0], peak_memory_bytes_by_rank=[141 * 2**30], losses=[1234.5], parts=PARTS)
    long = row("zero3 micro 16 bf16 compiled math attention", large, samples_per_step=2**20, slots=1024)
    hostile = [row("[red]a[/red]\x1b[2J"), failed("b", reason="[/]\nTraceback")]
    for found in (results(), results(*comparison()), results(*comparison(), long, *hostile)):
        for columns in (60, 80, 200):
            text = results_table(found, columns)
            assert max(map(len, text.splitlines()), default=0) <= columns
            assert "None" not in text
            assert "\x1b" not in text
    words = " ".join(text.split())
    assert "zero3 1 out of memory: it asked for 2 GiB" in words
    assert "[red]a[/red]" in words


# ------------------------------------------------------------------------------------------- pictures


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_pictures_of_a_comparison_and_of_its_file(tmp_path: Path) -> None:
    found = results(*comparison())
    drawn = create_performance_visualizations(found, tmp_path / "pictures")
    assert names(drawn) == [
        *("throughput.png", "memory.png", "loss.png", "scaling.png", "bubble.png", "schedules.png")
    ]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)
    assert sorted((tmp_path / "pictures").iterdir()) == sorted(drawn)

    # Only what makes sense: no pipeline, one number of slots, no losses.
    path = write_report(results(row("zero1", repetition(losses=[]))), tmp_path, page=False)[0]
    assert names(create_performance_visualizations(str(path), str(tmp_path))) == [
        "throughput.png",
        "memory.png",
    ]


TRAINING: dict[str, Any] = {
    "method": "zero1",
    "slots": 2,
    "run_dir": "runs/one",
    "samples_per_second": 100.0,
    "losses_per_epoch": (3.0, 2.5),
    "seconds_per_epoch": (10.0, 12.0),
    "peak_memory_bytes": 12 * MIB,
}


def test_whole_trainings_are_drawn(tmp_path: Path) -> None:
    """As ``run_training_experiment`` returns them; their ``to_dict()`` here."""
    drawn = create_performance_visualizations([TRAINING, {**TRAINING, "method": "zero2"}], tmp_path)
    assert names(drawn) == ["throughput.png", "memory.png", "loss.png"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([{"strategy": "a", "throughput": 3}], "run_training_experiment()"),
        (7, "holds no results"),
        ([], "nothing in them was measured"),
    ],
)
def test_what_is_no_result_is_refused(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create_performance_visualizations(given, tmp_path / "new")
    assert says in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_pictures_of_nothing_are_refused(tmp_path: Path) -> None:
    for nothing in (results(failed("zero3")), tmp_path / "results.json"):
        refusal(lambda nothing=nothing: create_performance_visualizations(nothing, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 5000, "nul\0byte"])
def test_pictures_where_none_can_be_written_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    problem = refusal(lambda: create_performance_visualizations(results(row()), tmp_path / name))
    assert "cannot be written" in problem.message
    assert (tmp_path / "file").read_text() == "mine"


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "throughput.png").mkdir()
    problem = refusal(lambda: create_performance_visualizations(results(row("zero1")), tmp_path))
    assert problem.origin == str(tmp_path / "throughput.png")
    assert [path.name for path in tmp_path.iterdir()] == ["throughput.png"]


def test_pictures_are_readable_by_others_and_leave_the_callers_settings(tmp_path: Path) -> None:
    (tmp_path / "any").write_text("")
    with mpl.rc_context({"font.size": 31}):
        (picture, *_) = create_performance_visualizations(results(row("$x^2$ 戦略")), tmp_path)
        assert mpl.rcParams["font.size"] == 31
    assert stat.S_IMODE(picture.stat().st_mode) == stat.S_IMODE((tmp_path / "any").stat().st_mode)
