"""Files of every format become documents; what cannot be read is named by file, line and byte."""

from __future__ import annotations

import json
import sys

import pytest

from determined_ds.errors import DataError
from model_defs.common.documents import read_documents, standard_library_files
from model_defs.common.records import MAX_PROBLEMS


def contents(path, **options):
    return [(document.name, document.content.decode()) for document in read_documents(str(path), **options)]


def problems_of(path, **options):
    with pytest.raises(DataError) as caught:
        read_documents(str(path), **options)
    for problem in caught.value.problems:
        assert problem.key == "data.path"
        assert problem.value == str(path)
        assert problem.fix
    return caught.value.problems


# --- the standard library ---


def test_the_standard_library_is_large_sorted_and_without_what_was_installed():
    documents = standard_library_files()
    names = [document.name for document in documents]
    assert "json/decoder.py" in names
    assert len(set(names)) == len(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert sum(len(document.content) for document in documents) > 5 * 2**20


def test_the_standard_library_is_capped_by_leaving_out_the_last_files():
    some = standard_library_files(max_bytes=2**20)
    assert sum(len(document.content) for document in some) <= 2**20
    assert some == standard_library_files()[: len(some)]


# --- formats ---


def test_text_files_are_one_document_each(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("naïve\r\n".encode())
    assert contents(file) == [("a.txt", "naïve\r\n")]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines_are_one_document_each(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    file.write_text('{"body": "one\\u2028"}\n\n{"body": ""}\n{"body": "two", "text": 3}', encoding="utf-8")
    assert contents(file, text_field="body") == [(f"{file.name}:1", "one\u2028"), (f"{file.name}:4", "two")]


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\\ud800b"}')
    assert contents(file) == [("a.jsonl:1", "a?b")]


def test_parquet_rows_are_one_document_each(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["one", "", "two"], "id": [1, 2, 3]}), file)
    assert contents(file, text_field="body") == [("a.parquet:1", "one"), ("a.parquet:3", "two")]
    (problem,) = problems_of(file)
    assert problem.message == "a.parquet has no 'text'; its columns: body, id."
    (problem,) = problems_of(file, text_field="id")[:1]
    assert problem.message == "a.parquet:1: 'id' is of type int, not a string."


def test_parquet_that_is_none(tmp_path):
    pytest.importorskip("pyarrow")
    file = tmp_path / "a.parquet"
    file.write_text("not a table")
    (problem,) = problems_of(file)
    assert "a.parquet is not a parquet file" in problem.message


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1")
    (problem,) = problems_of(file)
    assert problem.fix == "pip install pyarrow"


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
    assert sorted(contents(tmp_path)) == [
        ("a.py", "1"),
        ("b/a.rs", "2"),
        ("b/c.txt", "3"),
        ("z.jsonl:1", "4"),
    ]
    assert read_documents(str(tmp_path)) == read_documents(str(tmp_path))


# --- what cannot be read ---


def test_nothing_there(tmp_path):
    (problem,) = problems_of(tmp_path / "nowhere")
    assert "no such file or folder" in problem.message


def test_a_folder_without_text(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\0")
    (problem,) = problems_of(tmp_path)
    assert "no text files" in problem.message
    assert ".jsonl" in problem.fix


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    (problem,) = problems_of(tmp_path / name)
    assert "empty" in problem.message


def test_text_that_is_not_utf_8_is_named_by_file_and_byte(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    (tmp_path / "worse.txt").write_bytes(b"\xff")
    problems = problems_of(tmp_path)
    assert [problem.message for problem in problems] == [
        "latin.txt is not UTF-8: byte 0xef at offset 2.",
        "worse.txt is not UTF-8: byte 0xff at offset 0.",
    ]
    assert "iconv" in problems[0].fix


def test_lines_that_are_wrong_are_named_by_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = ['{"text": "good"}', '{"text": ', '["text"]', '{"body": "b", "id": 1}', '{"text": 7}', "{}"]
    file.write_text("\n".join(lines))
    problems = problems_of(file)
    assert problems[0].message.startswith("a.jsonl:2 is not JSON: ")
    assert [problem.message for problem in problems[1:]] == [
        "a.jsonl:3 is of type list, not an object.",
        "a.jsonl:4 has no 'text'; its columns: body, id.",
        "a.jsonl:5: 'text' is of type int, not a string.",
        "a.jsonl:6 has no 'text'; its columns: none.",
    ]
    assert problems[2].fix == "data.text_field: one of body, id"


def test_when_every_line_is_wrong_the_first_are_enough(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps({'body': 'b'})}\n" * 1000)
    assert len(problems_of(file)) == MAX_PROBLEMS


def test_a_file_that_leads_nowhere(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    (problem,) = problems_of(tmp_path)
    assert problem.message == "a.txt cannot be read: No such file or directory."
