"""Rows of text, with labels or without: out of tables and text files, or out of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from model_defs.common.files import visible_files
from model_defs.common.sections import data_error

TABLES = (".csv", ".jsonl", ".parquet")
# Tests are left out because distributions differ in whether they install them.
SKIPPED = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


class Row(NamedTuple):
    """A text, and its name: that of its file, and the row from 1 where the file is a table."""

    name: str
    text: str
    label: str | int = ""
    """A class by its name, or by its number from 0; "" where rows have no labels."""


def read_rows(
    path: str, *, key: str = "data.path", text: str = "text", label: str | None = None
) -> list[Row]:
    """The rows of a file, or of a folder's files at any depth in the order of their names.

    A ``.csv``, ``.jsonl`` or ``.parquet`` is a table; any other file is one text in UTF-8. Hidden files are skipped.

    Args:
        path: File or folder.
        key: The configuration key that named it, for errors.
        text: Column of a table, or field of its JSON, that holds the text.
        label: The one that holds the label; None: there are no labels.

    Raises:
        DataError: There is nothing, or something that cannot be read: the file and the row are named.
    """
    rows: list[Row] = []
    for name, file in visible_files(Path(path).expanduser()):
        if file.suffix.lower() in TABLES:
            rows += _rows_of_table(name, file, key, text, label)
        elif label is not None:
            fix = f"a {', '.join(TABLES[:-1])} or {TABLES[-1]}; or take the file out of the folder"
            raise data_error(key, str(file), "is no table of texts and labels.", fix)
        else:
            try:
                rows.append(Row(name, file.read_bytes().decode("utf-8")))
            except (OSError, UnicodeDecodeError) as error:
                fix = "text in UTF-8 (iconv -f latin1 -t utf-8); or take the file out of the folder"
                raise data_error(key, str(file), f"cannot be read: {error}.", fix) from error
    if not any(row.text for row in rows):
        fix = f"a file or folder with text that every slot can read, or {key}: null"
        raise data_error(key, path, f"there is no text, seen from {os.getcwd()}.", fix)
    return rows


def _rows_of_table(name: str, file: Path, key: str, text: str, label: str | None) -> Iterator[Row]:
    """By pyarrow, which refuses rows with too many or too few fields and fields of mixed types."""
    import pyarrow
    from pyarrow import csv, json, parquet

    columns = [text] if label is None else [text, label]
    fix = f"a table of rows, each with {' and '.join(columns)}"
    try:
        # In one block: a text may be longer than the reader's own.
        block_size = max(2**20, file.stat().st_size)
        if file.suffix.lower() == ".parquet":
            table = parquet.read_table(file)
        elif file.suffix.lower() == ".csv":
            strings = csv.ConvertOptions(column_types=dict.fromkeys(columns, pyarrow.string()))
            parsing = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(file, csv.ReadOptions(block_size=block_size), parsing, strings)
        else:
            # Else a text that looks like a date would be one.
            string = json.ParseOptions(explicit_schema=pyarrow.schema([(text, pyarrow.string())]))
            table = json.read_json(file, json.ReadOptions(block_size=block_size), string)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise data_error(key, str(file), f"cannot be read: {error}.", fix) from error
    if missing := [column for column in columns if column not in table.column_names]:
        named_by = "data.text_column" if missing[0] == text else "data.label_column"
        message = f"has no {missing[0]!r}; its columns: {', '.join(table.column_names)}."
        raise data_error(key, str(file), message, f"{named_by}: one of its columns")
    labels = [""] * len(table) if label is None else table[label].to_pylist()
    for number, (content, of_row) in enumerate(zip(table[text].to_pylist(), labels, strict=True), 1):
        if not isinstance(content, str):
            raise data_error(key, str(file), f"row {number}: {text!r} is {content!r}, not a text.", fix)
        if label is not None and (type(of_row) not in (str, int) or of_row == ""):
            message = f"row {number}: {label!r} is {of_row!r}, neither a name nor a whole number."
            raise data_error(
                key, str(file), message, "the name of a class, or its number from 0, in every row"
            )
        yield Row(f"{name}:{number}", content, of_row)


def standard_library(max_bytes: int = 16 * 2**20) -> list[Row]:
    """The source files of the running Python's standard library: real text that every machine has.

    Args:
        max_bytes: Files are taken in the order of their names, up to the first that would exceed this sum.
    """
    rows: list[Row] = []
    num_bytes = 0
    for name, file in visible_files(Path(sysconfig.get_path("stdlib")), skipped=SKIPPED):
        if file.suffix == ".py" and (content := file.read_bytes()):
            num_bytes += len(content)
            if num_bytes > max_bytes:
                break
            rows.append(Row(name, content.decode("utf-8", errors="replace")))
    return rows
