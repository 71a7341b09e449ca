"""results.json is read as it was written, and a damaged file is refused with the key that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_results
from determined_ds.errors import Problem
from tests.package import refusal, refusals, write_report
from tests.report.making import comparison, content, failed, repetition, results, row


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Infinite and undefined losses, too; in JSON, where there are no such numbers, they are words."""

    def no_constant(constant: str) -> None:
        raise AssertionError(constant)

    lost = row("lost", repetition(losses=["NaN", "Infinity", "-Infinity"]))
    found = results(*comparison(), lost, failed("zero3", reason='a "b", c\n戦略'))
    path = write_report(found, tmp_path / "new", page=False)[0]
    again = load_results(path)
    assert repr(again) == repr(found)  # NaN is not NaN; it is written the same
    assert [str(each) for each in again.rows[-2].repetitions[0].losses] == ["nan", "inf", "-inf"]
    json.loads(path.read_text(), parse_constant=no_constant)
    text = path.read_text()
    write_report(again, tmp_path / "new", page=False)
    assert path.read_text() == text


def refused(path: Path, text: str) -> tuple[Problem, ...]:
    """The problems of a file with this text."""
    path.write_text(text)
    return refusals(lambda: load_results(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[1, 2]", "is not a file of results"),
        ('{"rows": []}', "is not a file of results"),
        ('{"kind": "results of determined_ds", "kind": 1}', "'kind' is given twice"),
        ('{"kind": NaN}', "NaN without quotes"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
    ],
    ids=["empty", "list", "no kind", "twice", "NaN", "deep", "long"],
)
def test_another_programs_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "results.json", text)
    assert said in problem.message
    assert problem.origin == str(tmp_path / "results.json")


def test_every_file_cut_short_is_refused(tmp_path: Path) -> None:
    text = json.dumps(content(*comparison()))
    for length in range(0, len(text) - 1, 97):
        (problem,) = refused(tmp_path / "results.json", text[:length])
        assert "is not JSON" in problem.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    strange = (Path("/dev/null"), Path("nul\0byte"), Path("x" * 5000))
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "binary", *strange):
        assert refusal(lambda path=path: load_results(path)).message


@pytest.mark.parametrize("version", [1, 3, "2", 2.0, True, None])
def test_another_format_is_refused(version: object, tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "results.json", json.dumps(content(format=version)))
    assert problem.key == "format"


FIRST, SECOND = "rows[0]", "rows[1]"
STEP, LOSS = "rows[0].repetitions[0].step_seconds[1]", "rows[0].repetitions[0].losses[3]"
MANY = 10**400  # no float holds it


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("title", [5, None]),
        ("titel", ["x"]),
        ("accelerator", ["tpu"]),
        ("rows", [{}]),
        (SECOND, [5]),
        (f"{FIRST}.slts", [2]),
        (f"{FIRST}.slots", [0, True, None, 2.0, "2"]),
        (f"{FIRST}.status", ["fine"]),
        (f"{FIRST}.zero_stage", [4]),
        (f"{FIRST}.precision", ["fp8"]),
        ("rows[0].repetitions[0].bubble", [2]),
        ("rows[0].repetitions[0].x", [2]),
        (STEP, ["fast", "NaN", "Infinity", "1.5", 0, MANY, True, None]),
        (LOSS, ["nan", "1.5", True, None, MANY]),
    ],
)
def test_a_damaged_value_is_named(key: str, values: list[object], tmp_path: Path) -> None:
    for value in values:
        data: Any = content(row("zero1"), failed("zero3"))
        *path, last = re.findall(r"\w+", key)
        inside = data
        for step in path:
            inside = inside[int(step) if step.isdigit() else step]
        inside[int(last) if last.isdigit() else last] = value
        (problem,) = refused(tmp_path / "results.json", json.dumps(data))
        assert problem.key == key


def test_a_missing_key_is_named_and_a_misspelled_one_corrected(tmp_path: Path) -> None:
    data = content(machin="m")
    del data["title"]
    missing, unknown = sorted(
        refused(tmp_path / "results.json", json.dumps(data)), key=lambda each: each.key
    )[::-1]
    assert (missing.key, unknown.key) == ("title", "machin")
    assert "'machine'" in unknown.fix


def test_not_every_damaged_value_of_thousands_is_listed(tmp_path: Path) -> None:
    data = content(row("zero1", repetition(losses=["x"] * 1000)), steps=-1)
    problems = refused(tmp_path / "results.json", json.dumps(data))
    assert problems[0].key == "steps"
    assert len(problems) < 100
