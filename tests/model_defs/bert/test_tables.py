"""Tables of every format become rows; what is not one is named by its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_defs.bert.tables import read_table
from tests.package import refusals


def rows(path: Path) -> list[tuple[str, str, str | int]]:
    return [(row.name, row.text, row.label) for row in read_table("data.path", str(path))]


def test_csv_and_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('\ufefflabel,text\r\nyes,"one, ""two""\nthree"\r\nno,naïve\r\n'.encode())
    assert rows(tmp_path / "a.csv") == [("a.csv:3", 'one, "two"\nthree', "yes"), ("a.csv:4", "naïve", "no")]
    (tmp_path / "b.tsv").write_text("text\tlabel\tid\none, two\t1\t7\n")
    assert rows(tmp_path / "b.tsv") == [("b.tsv:2", "one, two", "1")]


def test_a_text_longer_than_csv_readers_like(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\n{'x' * 200_000},1\n")
    assert len(rows(tmp_path / "a.csv")[0][1]) == 200_000


def test_json_lines_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "label": 0}\n\n{"label": "x", "text": "two"}')
    assert rows(tmp_path / "a.jsonl") == [("a.jsonl:1", "one", 0), ("a.jsonl:3", "two", "x")]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": [1, 0]}), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [("a.parquet:1", "one", 1), ("a.parquet:2", "two", 0)]


@pytest.mark.parametrize(
    ("file", "content", "places"),
    [
        ("a.xls", "", ["a.xls"]),
        ("a.csv", "text,label\n", [""]),
        ("a.csv", "sentence,label\nx,1\n", ["a.csv:1"]),
        ("a.csv", "text,label\nx\ny,1\na,b,c\n", ["a.csv:2", "a.csv:4"]),
        ("a.csv", 'text,label\n"x" y,1\n', ["a.csv"]),
        ("a.jsonl", '{"text": "x", "label": 0.5}\n{"text": "x", "label": null}', ["a.jsonl:1", "a.jsonl:2"]),
    ],
)
def test_rows_that_are_none_are_named_by_their_lines(
    file: str, content: str, places: list[str], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(content)
    found = refusals(lambda: rows(tmp_path / file))
    assert [problem.key for problem in found] == ["data.path"] * len(places)
    for problem, place in zip(found, places, strict=True):
        assert problem.message.startswith(place)
