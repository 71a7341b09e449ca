"""results.json: what is written is read again, and what is not its like is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from determined_ds.documents.strict_json import MAX_PROBLEMS
from determined_ds.errors import Problem
from determined_ds.report.results import (
    Results,
    load_results,
    read_row,
    results_text,
    save_results,
    write_row,
)
from tests.making import refusal, refusals
from tests.report.making import any_results, comparison, failed, few, repetition, results, row


def strictly(text: str) -> Any:
    """JSON read by the letter: no NaN, no Infinity."""

    def no_constant(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=no_constant)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    save_results(comparison(), tmp_path / "new" / "results.json")
    assert load_results(tmp_path / "new" / "results.json") == comparison()


@few
@given(any_results())
def test_any_results_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, found: Results
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    save_results(found, path)
    strictly(path.read_text())
    assert repr(load_results(path)) == repr(found)  # NaN is not NaN; it is written the same


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_row(row("zero1"), tmp_path / "measured.json")
    assert read_row(tmp_path / "measured.json") == row("zero1")


def test_the_file_says_what_it_is() -> None:
    data = strictly(results_text(comparison()))
    assert list(data)[:2] == ["kind", "format"]
    assert data["format"] == 2
    assert data["rows"][0]["name"] == "zero0"


def test_numbers_that_are_not_finite_are_strings(tmp_path: Path) -> None:
    lost = results(row("zero1", repetition(losses=(math.nan, math.inf, -math.inf))))
    save_results(lost, tmp_path / "results.json")
    data = strictly((tmp_path / "results.json").read_text())
    assert data["rows"][0]["repetitions"][0]["losses"] == ["NaN", "Infinity", "-Infinity"]
    read = load_results(tmp_path / "results.json").rows[0].repetitions[0].losses
    assert [str(each) for each in read] == ["nan", "inf", "-inf"]


def test_a_measurement_that_went_wrong_is_written_all_the_same(tmp_path: Path) -> None:
    save_results(results(row("zero1", repetition([math.inf]))), tmp_path / "results.json")
    problem = refusal(lambda: load_results(tmp_path / "results.json"))
    assert (problem.key, problem.value) == ("rows[0].repetitions[0].step_seconds[0]", "Infinity")


def test_numbers_stand_on_one_line() -> None:
    assert '"step_seconds": [0.2, 0.1, 0.3],' in results_text(results(row()))


def test_the_same_results_give_the_same_bytes() -> None:
    assert results_text(comparison()) == results_text(comparison())


# ------------------------------------------------------------------------------------------------ refused


def with_change(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> tuple[Problem, ...]:
    """The problems of a file that was changed by hand."""
    data = json.loads(results_text(results(row("zero1"), failed("zero3"))))
    change(data)
    (tmp_path / "results.json").write_text(json.dumps(data))
    return refusals(lambda: load_results(tmp_path / "results.json"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1, 2]", "is not a file of results"),
        ('{"rows": []}', "is not a file of results"),
        ('{"kind": "measurement of determined_ds", "format": 1}', "is not a file of results"),
        ('{"kind": "results of determined_ds", "kind": 1}', "'kind' is given twice"),
        ('{"kind": NaN}', "NaN without quotes"),
        ("[" * 100_000, "is not JSON: maximum recursion depth"),
        ("1" * 5000, "is not JSON: Exceeds the limit"),
        ("\ufeff{}", "is not JSON"),
    ],
)
def test_another_programs_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    problem = refusal(lambda: load_results(tmp_path / "results.json"))
    assert said in problem.message
    assert problem.origin == str(tmp_path / "results.json")
    assert problem.fix


def test_every_file_cut_short_is_refused(tmp_path: Path) -> None:
    text = results_text(comparison())
    path = tmp_path / "results.json"
    for length in range(0, len(text) - 1, 97):
        path.write_text(text[:length])
        assert "is not JSON" in refusal(lambda: load_results(path)).message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, said in (
        (tmp_path / "none.json", "no such file"),
        (tmp_path, "is a folder"),
        (tmp_path / "binary", "can't decode byte 0xff"),
        (Path("/dev/null"), "is a device"),
        (Path("nul\0byte"), "cannot be read"),
        (Path("x" * 5000), "cannot be read"),
    ):
        assert said in refusal(lambda path=path: load_results(path)).message


@pytest.mark.parametrize("version", [1, 3, "2", 2.0, True, None])
def test_another_format_is_refused(version: object, tmp_path: Path) -> None:
    (problem,) = with_change(tmp_path, lambda data: data.update(format=version))
    assert problem.key == "format"
    assert "the version that wrote it" in problem.fix


MANY = 10**400  # no float holds it
CHANGES: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("title", lambda data: data.pop("title"), "is missing"),
    ("titel", lambda data: data.update(titel="x"), "unknown key"),
    ("rows[0].slts", lambda data: data["rows"][0].update(slts=2), "unknown key"),
    ("rows[0].repetitions[0].x", lambda data: data["rows"][0]["repetitions"][0].update(x=2), "unknown key"),
    ("title", lambda data: data.update(title=5), "must be a valid string"),
    ("accelerator", lambda data: data.update(accelerator="tpu"), "must be 'cpu' or 'cuda'"),
    ("rows", lambda data: data.update(rows={}), "must be a list"),
    ("rows[1]", lambda data: data["rows"].__setitem__(1, 5), "must be a mapping"),
    ("rows[0].slots", lambda data: data["rows"][0].update(slots=0), "must be greater than or equal to 1"),
    ("rows[0].slots", lambda data: data["rows"][0].update(slots=True), "must be a valid integer"),
    ("rows[0].slots", lambda data: data["rows"][0].update(slots=None), "must be a valid integer"),
    ("rows[0].slots", lambda data: data["rows"][0].update(slots=2.0), "must be a valid integer"),
    ("rows[0].slots", lambda data: data["rows"][0].update(slots="2"), "must be a valid integer"),
    ("rows[0].status", lambda data: data["rows"][0].update(status="fine"), "must be 'measured', 'failed'"),
    ("rows[0].zero_stage", lambda data: data["rows"][0].update(zero_stage=4), "less than or equal to 3"),
    ("rows[0].precision", lambda data: data["rows"][0].update(precision="fp8"), "must be 'fp32', 'bf16' or"),
    (
        "rows[0].repetitions[0].bubble",
        lambda data: data["rows"][0]["repetitions"][0].update(bubble=2),
        "to 1",
    ),
]
STEPS: list[tuple[object, str]] = [
    ("fast", "must be a valid number"),
    ("NaN", "must be greater than 0"),
    ("Infinity", "must be a finite number"),
    ("1.5", "must be a valid number"),
    (0, "must be greater than 0"),
    (MANY, "must be a valid number"),
    (True, "must be a valid number"),
    (None, "must be a valid number"),
]


@pytest.mark.parametrize(("key", "change", "said"), CHANGES)
def test_a_damaged_value_is_named(
    key: str, change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    (problem,) = with_change(tmp_path, change)
    assert problem.key == key
    assert said in problem.message
    assert problem.fix


@pytest.mark.parametrize(("value", "said"), STEPS)
def test_a_damaged_number_is_named(value: object, said: str, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["rows"][0]["repetitions"][0]["step_seconds"][1] = value

    (problem,) = with_change(tmp_path, change)
    assert problem.key == "rows[0].repetitions[0].step_seconds[1]"
    assert problem.value == value
    assert said in problem.message


@pytest.mark.parametrize("loss", ["nan", "1.5", True, None, MANY])
def test_a_loss_is_a_number_or_the_name_of_one_that_is_not_finite(loss: object, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["rows"][0]["repetitions"][0]["losses"] = [1, 2.5, "NaN", loss]

    (problem,) = with_change(tmp_path, change)
    assert problem.key == "rows[0].repetitions[0].losses[3]"


def test_all_that_is_damaged_is_named_but_not_without_end(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["steps"] = -1
        data["rows"][0]["repetitions"][0]["losses"] = ["x"] * 1000

    problems = with_change(tmp_path, change)
    assert problems[0].key == "steps"
    assert len(problems) == MAX_PROBLEMS


def test_a_misspelt_key_is_told_what_was_meant(tmp_path: Path) -> None:
    (problem,) = with_change(tmp_path, lambda data: data.update(machin="m"))
    assert "did you mean 'machine'" in problem.fix
    (problem,) = with_change(tmp_path, lambda data: data["rows"][0].update(slts=2))
    assert "did you mean 'slots'" in problem.fix
    (problem,) = with_change(tmp_path, lambda data: data["rows"][0]["repetitions"][0].update(buble=0))
    assert "did you mean 'bubble'" in problem.fix


def test_results_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = refusal(lambda: save_results(comparison(), tmp_path / "file" / "results.json"))
    assert "is not a writable path" in problem.message


def test_a_row_is_no_results(tmp_path: Path) -> None:
    write_row(row(), tmp_path / "measured.json")
    assert "is not a file of results" in refusal(lambda: load_results(tmp_path / "measured.json")).message
    save_results(comparison(), tmp_path / "results.json")
    assert "is not a file of a measurement" in refusal(lambda: read_row(tmp_path / "results.json")).message
