"""The files of a report, and pictures by themselves."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from determined_ds.report.results import load_results, save_results
from determined_ds.report.table import rows_csv
from determined_ds.report.written import create_performance_visualizations, write_report
from tests.making import refusal
from tests.report.making import comparison, failed, repetition, results, row

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_report_is_three_files(tmp_path: Path) -> None:
    written = write_report(comparison(), tmp_path / "new" / "report")
    assert [path.name for path in written] == ["results.json", "results.csv", "report.html"]
    assert sorted(path.name for path in (tmp_path / "new" / "report").iterdir()) == sorted(
        path.name for path in written
    )
    assert load_results(written[0]) == comparison()
    assert written[1].read_bytes().decode() == rows_csv(comparison())
    assert "<figure" in written[2].read_text()


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    write_report(results(failed("zero0")), tmp_path)
    write_report(results(failed("zero1")), tmp_path)
    assert load_results(tmp_path / "results.json") == results(failed("zero1"))
    for name in ("results.csv", "report.html"):
        assert "zero0" not in (tmp_path / name).read_text().replace(
            "zero0,zero1", ""
        )  # which is in the command


def test_on_the_way_the_page_can_be_left_out(tmp_path: Path) -> None:
    written = write_report(comparison(), tmp_path, page=False)
    assert [path.name for path in written] == ["results.json", "results.csv"]


def test_a_report_that_cannot_be_written_whole_is_not_begun(tmp_path: Path) -> None:
    write_report(results(failed("zero1")), tmp_path)
    (tmp_path / "results.csv").unlink()
    (tmp_path / "results.csv").mkdir()
    problem = refusal(lambda: write_report(results(failed("zero2")), tmp_path))
    assert "is a folder" in problem.message
    assert load_results(tmp_path / "results.json") == results(failed("zero1"))


def test_pictures_of_a_comparison(tmp_path: Path) -> None:
    written = create_performance_visualizations(comparison(), tmp_path / "pictures")
    assert [path.name for path in written] == [
        "throughput.png",
        "memory.png",
        "loss.png",
        "scaling.png",
        "bubble.png",
        "schedules.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written)
    assert sorted((tmp_path / "pictures").iterdir()) == sorted(written)  # and nothing else is left there


def test_pictures_of_a_file(tmp_path: Path) -> None:
    """Only those that make sense: no pipeline, and as many slots for all."""
    save_results(results(row("zero1", repetition(losses=()))), tmp_path / "results.json")
    written = create_performance_visualizations(str(tmp_path / "results.json"), str(tmp_path))
    assert [path.name for path in written] == ["throughput.png", "memory.png"]


def test_nothing_measured_is_nothing_to_draw(tmp_path: Path) -> None:
    problem = refusal(lambda: create_performance_visualizations(results(failed("zero3")), tmp_path / "new"))
    assert "nothing in them was measured" in problem.message
    assert not (tmp_path / "new").exists()


def test_pictures_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    problem = refusal(lambda: create_performance_visualizations(tmp_path / "results.json", tmp_path))
    assert problem.message == "no such file"


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 5000, "nul\0byte"])
def test_pictures_where_none_can_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    problem = refusal(
        lambda: create_performance_visualizations(results(row(tokens_per_sample=None)), tmp_path / name)
    )
    assert "cannot be written" in problem.message
    assert (tmp_path / "file").read_text() == "mine"


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "throughput.png").mkdir()
    problem = refusal(lambda: create_performance_visualizations(results(row("zero1")), tmp_path))
    assert problem.origin == str(tmp_path / "throughput.png")
    assert [path.name for path in tmp_path.iterdir()] == ["throughput.png"]


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    """As any file that is made: a page is to be shown."""
    (tmp_path / "any").write_text("")
    usual = stat.S_IMODE((tmp_path / "any").stat().st_mode)
    (picture, *_) = create_performance_visualizations(results(row("zero1")), tmp_path)
    assert stat.S_IMODE(picture.stat().st_mode) == usual
