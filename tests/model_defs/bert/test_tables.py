"""Tables of every format become rows; what cannot be read is named by file and row."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.errors import DataError
from model_defs.bert.tables import read_table
from model_defs.common.records import MAX_PROBLEMS


def rows(path: Path) -> list[tuple[str, str, str | int]]:
    return [(row.name, row.text, row.label) for row in read_table("data.path", str(path))]


def messages(path: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        read_table("data.path", str(path))
    for problem in caught.value.problems:
        assert (problem.key, problem.value) == ("data.path", str(path))
        assert problem.fix
    return [problem.message for problem in caught.value.problems]


def test_csv_and_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('\ufefflabel,text\r\nyes,"one, ""two""\nthree"\r\nno,naïve\r\n'.encode())
    assert rows(tmp_path / "a.csv") == [("a.csv:3", 'one, "two"\nthree', "yes"), ("a.csv:4", "naïve", "no")]
    (tmp_path / "b.tsv").write_text("text\tlabel\tid\none, two\t1\t7\n")
    assert rows(tmp_path / "b.tsv") == [("b.tsv:2", "one, two", "1")]


def test_a_text_longer_than_csv_readers_like(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\n{'x' * 200_000},1\n")
    assert len(rows(tmp_path / "a.csv")[0][1]) == 200_000


def test_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one\\u2028", "label": 0}\n\n{"label": "x", "text": "a\\ud800b"}'
    )
    assert rows(tmp_path / "a.jsonl") == [("a.jsonl:1", "one\u2028", 0), ("a.jsonl:3", "a?b", "x")]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": [1, 0]}), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [("a.parquet:1", "one", 1), ("a.parquet:2", "two", 0)]
    parquet.write_table(pyarrow.table({"text": ["one"], "labels": [1]}), tmp_path / "b.parquet")
    assert messages(tmp_path / "b.parquet") == ["b.parquet has no 'label'; its columns: text, labels."]
    (tmp_path / "c.parquet").write_text("not a table")
    assert "c.parquet is not a parquet file" in messages(tmp_path / "c.parquet")[0]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("text,label\nlast,1\n")
    (tmp_path / "a.jsonl").write_text('{"text": "first", "label": 0}\n')
    (tmp_path / "README.md").write_text("nothing of it")
    assert [text for _, text, _ in rows(tmp_path)] == ["first", "last"]


def test_what_is_not_there(tmp_path: Path) -> None:
    assert "no such file or folder" in messages(tmp_path / "nowhere")[0]
    assert messages(tmp_path) == ["the folder holds no table."]
    (tmp_path / "a.xls").touch()
    assert "is not a table" in messages(tmp_path / "a.xls")[0]
    (tmp_path / "a.csv").write_text("text,label\n")
    assert messages(tmp_path / "a.csv") == ["there is no row in it."]


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\nna\xefve,1\n")
    assert messages(tmp_path / "a.csv") == ["a.csv is not UTF-8: byte 0xef at offset 13."]


def test_missing_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sentence,label\nx,1\n")
    assert messages(tmp_path / "a.csv") == ["a.csv:1 has no 'text'; its columns: sentence, label."]
    (tmp_path / "b.jsonl").write_text('{"sentence": "x"}\n' * 100)
    found = messages(tmp_path / "b.jsonl")
    assert found[0] == "b.jsonl:1 has no 'text' and no 'label'; its columns: sentence."
    assert len(found) == MAX_PROBLEMS


def test_rows_that_are_none(tmp_path: Path) -> None:
    lines = [
        '{"text": 3, "label": 0}',
        '{"text": "x", "label": 0.5}',
        "[1]",
        "{",
        '{"text": "x", "label": null}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = messages(tmp_path / "a.jsonl")
    assert found[0] == "a.jsonl:1: 'text' is of type int, not a string."
    assert found[1] == "a.jsonl:2: 'label' is 0.5, neither a name nor a whole number."
    assert found[2] == "a.jsonl:3 is of type list, not an object."
    assert found[3].startswith("a.jsonl:4 is not JSON: ")
    assert "'label' is None" in found[4]
    (tmp_path / "b.csv").write_text("text,label\nx\ny,1\na,b,c\n")
    assert messages(tmp_path / "b.csv") == [
        "b.csv:2 does not have the 2 cells of the first line.",
        "b.csv:4 does not have the 2 cells of the first line.",
    ]
    (tmp_path / "c.csv").write_text('text,label\n"x" y,1\n')
    assert "c.csv is not CSV" in messages(tmp_path / "c.csv")[0]
