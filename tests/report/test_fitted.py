"""Tables fit any terminal, and their rows can be told apart in it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from determined_ds.report.fitted import FittedColumn, FittedRow, fitted, plain
from determined_ds.report.texts import distinct_names

COLUMNS = (
    FittedColumn(head=("strategy",), no_room="above"),
    FittedColumn(head=("step, ms",), align="right"),
    FittedColumn(head=("p95, ms",), align="right", no_room="drop", rank=2),
    FittedColumn(head=("memory",), align="right", no_room="drop", rank=1),
    FittedColumn(head=("best for",), no_room="below"),
)
ROWS = (
    FittedRow(cells=[("zero0",), ("10",), ("11",), ("700",), ("",)]),
    FittedRow(cells=[("zero1 micro 16 bf16",), ("9",), ("10",), ("690",), ("speed",)]),
)
NOTE = "no room here for: "


def shown(width: int) -> list[str]:
    return [plain(line) for line in fitted(COLUMNS, ROWS, width)]


def test_with_room_for_all_it_is_a_table() -> None:
    assert shown(80) == [
        "strategy             step, ms  p95, ms  memory  best for",
        "zero0                      10       11     700",
        "zero1 micro 16 bf16         9       10     690  speed",
    ]


def test_what_may_stand_below_goes_there_first() -> None:
    assert shown(50) == [
        "strategy             step, ms  p95, ms  memory",
        "zero0                      10       11     700",
        "zero1 micro 16 bf16         9       10     690",
        "  best for speed",
    ]


def test_what_all_rows_have_is_said_once() -> None:
    rows = [replace(row, cells=[*row.cells[:4], ("speed",)]) for row in ROWS]
    assert [plain(line) for line in fitted(COLUMNS, rows, 50)][-2:] == [
        "zero1 micro 16 bf16         9       10     690",
        "in every row: best for speed",
    ]


def test_a_name_that_is_too_long_stands_above_its_row() -> None:
    assert shown(40) == [
        "strategy       step, ms  p95, ms  memory",
        "zero0                10       11     700",
        "zero1 micro 16 bf16",
        "                      9       10     690",
        "  best for speed",
    ]


def test_then_the_least_important_columns_are_left_out_by_name() -> None:
    assert shown(28) == [
        "strategy    step, ms  memory",
        "zero0             10     700",
        "zero1 micro 16 bf16",
        "                   9     690",
        "  best for speed",
        f"{NOTE}p95, ms",
    ]


def test_a_text_across_wraps_in_what_is_left_of_the_line() -> None:
    row = FittedRow(cells=[("zero3",)], rest="out of memory: it asked for 2 GiB more than there is")
    lines = [plain(line) for line in fitted(COLUMNS, [*ROWS, row], 40)][-3:]
    assert [line[:15] for line in lines] == ["zero3          ", " " * 15, " " * 15]
    assert " ".join(line[15:] for line in lines) == row.rest


names = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" "), min_size=1, max_size=70
)
tables = st.lists(
    st.tuples(names, st.text("0123456789.,", max_size=14), st.text("0123456789", max_size=30)), max_size=6
)


@given(tables, st.integers(10, 200))
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    found = [FittedRow(cells=[(name,), (one,), (two,), (two,), (one,)]) for name, one, two in rows]
    lines = [plain(line) for line in fitted(COLUMNS, found, width)]
    assert all(cell_len(line) <= width for line in lines)
    text = "".join("".join(lines).split())
    for name, one, _ in rows:
        assert "".join(name.split()) in text
        assert one in text


@given(st.lists(names.map(lambda name: " ".join(name.split())), max_size=30), st.integers(8, 40))
def test_shortened_names_are_pairwise_distinct(given_names: list[str], most: int) -> None:
    texts = distinct_names(given_names, most)
    assert set(texts) == set(given_names)
    assert len(set(texts.values())) == len(set(given_names))
    assert all(len(text) <= most for text in texts.values())
    assert all(texts[name] == name for name in given_names if len(name) <= most)


def test_what_names_have_in_common_is_left_out_of_them() -> None:
    found = [
        "zero0 micro 16 bf16 compiled math attention",
        "zero0 micro 16 bf16 not compiled math attention",
        "zero0 micro 8 bf16 compiled math attention",
    ]
    assert list(distinct_names(found, 24).values()) == [
        "micro 16 compiled",
        "micro 16 not compiled",
        "micro 8 compiled",
    ]


def test_names_that_are_alike_when_they_are_short_are_numbered() -> None:
    assert list(distinct_names(["abcdefgh1ijklmnop", "abcdefgh2ijklmnop"], 8).values()) == [
        "abcd…nop",
        "ab…op #2",
    ]
