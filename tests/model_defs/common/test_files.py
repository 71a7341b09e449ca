"""Files of every format become documents and columns; what cannot be read is named by its file."""

from __future__ import annotations

import pytest

from model_defs.common.files import read_documents, read_table, standard_library_files
from tests.package import refusal

COLUMNS = {"data.text_column": "text", "data.label_column": "label"}


def contents(path, **options):
    return [(document.name, document.content.decode()) for document in read_documents(str(path), **options)]


def write_parquet(file, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), file)


def test_the_standard_library_is_without_what_was_installed():
    names = [document.name for document in standard_library_files()]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)


def test_json_lines_are_one_document_each(tmp_path):
    """A text that looks like a date is one, and so is one longer than a block of the reader."""
    file = tmp_path / "a.ndjson"
    long = "x" * 3 * 2**20
    lines = [
        '{"body": "one\\u2028"}',
        '{"body": ""}',
        f'{{"id": 3, "body": "{long}"}}',
        '{"body": "2020-01-01"}',
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    found = [("1", "one\u2028"), ("3", long), ("4", "2020-01-01")]
    assert contents(file, text_field="body") == [(f"{file.name}:{row}", text) for row, text in found]


def test_parquet_rows_are_one_document_each(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, body=["one", "", "two"], id=[1, 2, 3])
    assert contents(file, text_field="body") == [("a.parquet:1", "one"), ("a.parquet:3", "two")]


def test_folders_are_read_recursively_by_name_without_hidden_binary_and_empty_files(tmp_path):
    for name, content in {
        "b/c.txt": b"3",
        "b/a.rs": b"2",
        "a.py": b"1",
        "z.jsonl": b'{"text": "4"}\n',
        ".git/config": b"hidden",
        "b/.hidden.txt": b"hidden",
        "picture.png": b"\x89PNG\0\xff",
        "empty.txt": b"",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    found = [("a.py", "1"), ("b/a.rs", "2"), ("b/c.txt", "3"), ("z.jsonl:1", "4")]
    assert sorted(contents(tmp_path)) == found
    (tmp_path / "utf16.txt").write_bytes("naïve".encode("utf-16"))
    assert refusal(lambda: read_documents(str(tmp_path))).value == str(tmp_path / "utf16.txt")


def test_tables_of_texts_and_labels(tmp_path):
    def columns(name):
        return read_table(tmp_path / name, COLUMNS)

    (tmp_path / "a.csv").write_bytes('\ufefflabel,text\r\nyes,"one, ""two""\nthree"\r\nno,naïve\r\n'.encode())
    assert columns("a.csv") == [['one, "two"\nthree', "naïve"], ["yes", "no"]]
    (tmp_path / "b.tsv").write_text("text\tlabel\tid\none, two\t1\t7\nNA\tNA\t8\n")
    assert columns("b.tsv") == [["one, two", "NA"], ["1", "NA"]]
    (tmp_path / "c.jsonl").write_text('{"text": "one", "label": 0}\n\n{"label": 2, "text": "two"}')
    assert columns("c.jsonl") == [["one", "two"], [0, 2]]
    write_parquet(tmp_path / "d.parquet", text=["one", "two"], label=[1, 0])
    assert columns("d.parquet") == [["one", "two"], [1, 0]]


# --- what cannot be read ---


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nowhere/a.txt", None, "there is no file"),
        ("a.txt", b"", "there is no text"),
        ("a.txt", b"na\xefve", "byte 0xef in position 2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "row 1"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 7}\n', "changed from string to number"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "its columns: text, body, id"),
        ("a.parquet", b"not a table", "cannot be read"),
    ],
)
def test_what_is_no_text(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = refusal(lambda: read_documents(str(tmp_path / name)))
    assert (found.key, found.value, said in found.message) == ("data.path", str(tmp_path / name), True), found


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "sentence,label\nx,1\n", "its columns: sentence, label"),
        ("a.csv", "text,label\nx,1,2\ny,1\n", "Expected 2 columns, got 3"),
        ("a.csv", "text,label\nx\ny,1\n", "Expected 2 columns, got 1"),
        ("a.jsonl", '{"text": "x", "label": null}', "a row has no 'label'"),
    ],
)
def test_what_is_no_table(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    assert said in refusal(lambda: read_table(tmp_path / name, COLUMNS)).message
