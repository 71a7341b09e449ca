"""Files of every format become documents; what cannot be read is named by file, line and byte."""

from __future__ import annotations

import pytest

from model_defs.common.documents import read_documents, standard_library_files
from tests.package import refusals


def contents(path, **options):
    return [(document.name, document.content.decode()) for document in read_documents(str(path), **options)]


def problems_of(path, **options):
    found = refusals(lambda: read_documents(str(path), **options))
    assert {(problem.key, problem.value) for problem in found} == {("data.path", str(path))}
    return found


# --- the standard library ---


def test_the_standard_library_is_large_sorted_and_without_what_was_installed():
    documents = standard_library_files()
    names = [document.name for document in documents]
    assert "json/decoder.py" in names
    assert len(set(names)) == len(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert sum(len(document.content) for document in documents) > 5 * 2**20


# --- formats ---


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_json_lines_are_one_document_each(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    file.write_text('{"body": "one\\u2028"}\n\n{"body": ""}\n{"body": "two", "text": 3}', encoding="utf-8")
    assert contents(file, text_field="body") == [(f"{file.name}:1", "one\u2028"), (f"{file.name}:4", "two")]


def test_parquet_rows_are_one_document_each(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["one", "", "two"], "id": [1, 2, 3]}), file)
    assert contents(file, text_field="body") == [("a.parquet:1", "one"), ("a.parquet:3", "two")]
    assert "its columns: body, id" in problems_of(file)[0].message
    assert problems_of(file, text_field="id")[0].message.startswith("a.parquet:1")
    file.write_text("not a table")
    assert "a.parquet" in problems_of(file)[0].message


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


def test_nothing_to_read(tmp_path):
    assert len(problems_of(tmp_path / "nowhere")) == 1
    (tmp_path / "picture.png").write_bytes(b"\0")
    assert ".jsonl" in problems_of(tmp_path)[0].fix
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).touch()
        assert "empty" in problems_of(tmp_path / name)[0].message
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    assert problems_of(tmp_path)[0].message.startswith("b.txt")


def test_text_that_is_not_utf_8_is_named_by_file_and_byte(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    (tmp_path / "worse.txt").write_bytes(b"\xff")
    latin, worse = (problem.message for problem in problems_of(tmp_path))
    assert all(word in latin for word in ("latin.txt", "0xef", "offset 2"))
    assert all(word in worse for word in ("worse.txt", "0xff", "offset 0"))


def test_lines_that_are_wrong_are_named_by_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = ['{"text": "good"}', '{"text": ', '["text"]', '{"body": "b", "id": 1}', '{"text": 7}', "{}"]
    file.write_text("\n".join(lines))
    problems = problems_of(file)
    assert [problem.message.split()[0].rstrip(":") for problem in problems] == [
        f"a.jsonl:{line}" for line in range(2, 7)
    ]
    assert problems[2].fix == "data.text_field: one of body, id"
