"""Files of texts and labels -> rows: CSV, JSON lines, parquet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from determined_ds.errors import DataError
from model_defs.common.records import DELIMITERS, JSON_LINES, MAX_PROBLEMS, PARQUET, RecordReader

SUFFIXES = frozenset({*JSON_LINES, *DELIMITERS, PARQUET})
TEXT_KEY, LABEL_KEY = "data.text_column", "data.label_column"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A text and what it is.

    Args:
        name: Its file and row, for errors.
        text: To classify.
        label: A class by name, or by number from 0.
    """

    name: str
    text: str
    label: str | int


def read_table(key: str, path: str, *, text_column: str = "text", label_column: str = "label") -> list[Row]:
    """All rows of a file, or of a folder's files in the order of their names; an empty text is a text.

    Args:
        key: The configuration key that named the path.
        path: File or folder.
        text_column: Column or field of the text.
        label_column: Column or field of the label.

    Raises:
        DataError: Everything that is wrong.
    """
    reader = RecordReader(key=key, path=path, columns={TEXT_KEY: text_column, LABEL_KEY: label_column})
    root = Path(path).expanduser()
    suffixes = ", ".join(sorted(SUFFIXES))
    files = [root]
    if root.is_dir():
        files = sorted(file for file in root.iterdir() if file.suffix.lower() in SUFFIXES)
        if not files:
            reader.refuse("the folder holds no table.", f"a folder with {suffixes} files")
    elif not root.exists():
        reader.refuse_path()
        files = []
    elif root.suffix.lower() not in SUFFIXES:
        reader.refuse(f"{root.name} is not a table.", f"one of {suffixes}")
        files = []
    rows = [row for file in files for row in _rows(reader, file)]
    if not rows and not reader.problems:
        reader.refuse("there is no row in it.", "a table with rows of texts and labels")
    if reader.problems:
        raise DataError(reader.problems[:MAX_PROBLEMS])
    return rows


def _rows(reader: RecordReader, file: Path) -> Iterator[Row]:
    """The records of a file whose text is a string and whose label is a name or a number."""
    column = reader.columns[LABEL_KEY]
    for where, record in reader.records(file, file.name):
        text, label = reader.string(where, record, TEXT_KEY), record[column]
        if isinstance(label, bool) or not isinstance(label, str | int) or label == "":
            message = f"{where}: {column!r} is {label!r}, neither a name nor a whole number."
            reader.refuse(message, "label every row by the name of a class, or by its number from 0")
        elif text is not None:
            yield Row(name=where, text=text, label=label)
