"""Files on disk -> documents and columns: text as it is; JSON lines, CSV and parquet as pyarrow reads them.

A document is what the split keeps together: a text file, a line of JSON, a row of a table.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_defs.common.sections import data_error

TEXT_SUFFIXES = frozenset({".txt", ".md", ".py", ".rst", ".text"})
JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TABLES = frozenset({*JSON_LINES, *DELIMITERS, PARQUET})
# Tests are left out because distributions differ in whether they install them.
SKIPPED_LIBRARY_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text.

    Args:
        name: Name relative to the folder that was read, ``/`` between its parts, the same on every machine;
            with ``:row`` for lines and rows, counted from 1.
        content: The text in UTF-8 (of the standard library: the bytes as they are).
    """

    name: str
    content: bytes


def standard_library_files(max_bytes: int = 16 * 2**20) -> list[Document]:
    """The source files of the running Python's standard library: real text that every machine has.

    Args:
        max_bytes: Files are taken in order of their names, up to the first that would exceed this sum.
    """
    library = Path(sysconfig.get_path("stdlib"))
    documents: list[Document] = []
    num_bytes = 0
    for name, file in _walk(library, skipped=SKIPPED_LIBRARY_FOLDERS):
        if file.suffix == ".py" and (content := file.read_bytes()):
            num_bytes += len(content)
            if num_bytes > max_bytes:
                break
            documents.append(Document(name=name, content=content))
    return documents


def files_of(path: str, *, key: str = "data.path") -> list[tuple[str, Path]]:
    """A file, or a folder's files at any depth in the order of their names: the name of each, and where it is.

    Args:
        path: File or folder. Hidden files and folders are skipped.
        key: The configuration key that named it.

    Raises:
        DataError: There is none.
    """
    root = Path(path).expanduser()
    files = list(_walk(root)) if not root.is_file() else [(root.name, root)]
    if not files:
        message = f"there is no file, seen from {os.getcwd()}."
        raise data_error(key, path, message, f"a path that every slot can read, or {key}: null")
    return files


def read_documents(path: str, *, key: str = "data.path", text_field: str = "text") -> list[Document]:
    """Read a file, or a folder recursively in the order of its names.

    By suffix: ``.jsonl``, ``.ndjson`` and ``.json`` hold one JSON object a line, ``.parquet`` is a table, all
    else is UTF-8 text. In a folder, hidden files are skipped, and so are binary files of unknown suffixes. Empty texts
    are dropped.

    Args:
        path: File or folder.
        key: The configuration key that named it, for errors.
        text_field: Field of JSON objects and column of tables that holds the text.

    Raises:
        DataError: Nothing there, nothing to read in it, or content that does not match the suffix.
    """
    documents: list[Document] = []
    for name, file in files_of(path, key=key):
        if file.suffix.lower() in JSON_LINES | {PARQUET}:
            texts = read_table(file, {"data.text_field": text_field}, key=key)["data.text_field"]
            rows = [(f"{name}:{number}", text.encode()) for number, text in enumerate(texts, start=1)]
            documents += [Document(name=row, content=content) for row, content in rows if content]
            continue
        try:
            content = file.read_bytes()
            is_named = file.suffix.lower() in TEXT_SUFFIXES or file == Path(path).expanduser()
            if is_named or b"\0" not in content[:8192]:
                content.decode("utf-8")
                documents += [Document(name=name, content=content)] if content else []
        except (OSError, UnicodeDecodeError) as error:
            fix = f"a readable file in UTF-8, e.g. by iconv -f latin1 -t utf-8 {name}; or leave it out"
            raise data_error(key, str(file), f"cannot be read: {error}.", fix) from error
    if not documents:
        raise data_error(key, path, "there is no text in it.", "a file or folder with text in it")
    return documents


def read_table(file: Path, columns: Mapping[str, str], *, key: str = "data.path") -> dict[str, list[Any]]:
    """The values of some columns of a table, none of them missing.

    Args:
        file: JSON lines, CSV, TSV or parquet.
        columns: Configuration key -> the column, or field, that it names; the first one holds text.
        key: The configuration key that named the file.

    Returns:
        Configuration key -> the values of its column.

    Raises:
        DataError: It cannot be read, or lacks a column or a value.
    """
    import pyarrow
    from pyarrow import csv, json, parquet

    suffix, text = file.suffix.lower(), next(iter(columns.values()))
    fix = f"one object a line, or a table, with the {' and '.join(columns.values())} of each"
    try:
        if suffix == PARQUET:
            table = parquet.read_table(file)
        elif suffix in DELIMITERS:
            kinds = dict.fromkeys(columns.values(), pyarrow.string())
            parsing = csv.ParseOptions(delimiter=DELIMITERS[suffix], newlines_in_values=True)
            reading = csv.ReadOptions(block_size=max(2**20, file.stat().st_size))
            table = csv.read_csv(file, reading, parsing, csv.ConvertOptions(column_types=kinds))
        else:
            of_text = pyarrow.schema([(text, pyarrow.string())])
            reading = json.ReadOptions(block_size=max(2**20, file.stat().st_size))
            table = json.read_json(file, reading, json.ParseOptions(explicit_schema=of_text))
        for named_by, column in columns.items():
            if column not in table.column_names or table[column].null_count:
                there = ", ".join(table.column_names)
                raise data_error(
                    key,
                    str(file),
                    f"a row has no {column!r}; its columns: {there}.",
                    f"{named_by}: one of {there}",
                )
        if not pyarrow.types.is_string(table[text].type) and not pyarrow.types.is_large_string(
            table[text].type
        ):
            raise data_error(key, str(file), f"{text!r} holds no text but {table[text].type}.", fix)
        return {named_by: table[column].to_pylist() for named_by, column in columns.items()}
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise data_error(key, str(file), f"cannot be read: {error}.", fix) from error


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Files below ``root`` that are not hidden, by name; skipped folders are not entered."""
    for folder, subfolders, names in os.walk(root):
        # os.walk enters what is left in this list, in this order.
        subfolders[:] = sorted(
            name for name in subfolders if name not in skipped and not name.startswith(".")
        )
        for name in sorted(name for name in names if not name.startswith(".")):
            yield Path(folder, name).relative_to(root).as_posix(), Path(folder, name)
