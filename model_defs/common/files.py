"""Files on disk -> documents and columns, and their split into training and validation.

A document is what the split keeps together: a text file, a line of JSON, a row of a table.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from model_defs.common.sections import data_error

T = TypeVar("T")
JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
TABLES = frozenset({*JSON_LINES, *DELIMITERS, PARQUET})
TEXT_SUFFIXES = frozenset({".txt", ".md", ".py", ".rst", ".text"})
# Tests are left out because distributions differ in whether they install them.
SKIPPED_LIBRARY_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


class Document(NamedTuple):
    """A text in UTF-8, and its name: the same on every machine, with ``:row`` for lines and rows, from 1."""

    name: str
    content: bytes


def standard_library_files(max_bytes: int = 16 * 2**20) -> list[Document]:
    """The source files of the running Python's standard library: real text that every machine has.

    Args:
        max_bytes: Files are taken in order of their names, up to the first that would exceed this sum.
    """
    documents: list[Document] = []
    num_bytes = 0
    for name, file in _walk(Path(sysconfig.get_path("stdlib")), skipped=SKIPPED_LIBRARY_FOLDERS):
        if file.suffix == ".py" and (content := file.read_bytes()):
            num_bytes += len(content)
            if num_bytes > max_bytes:
                break
            documents.append(Document(name, content))
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
    files = [(root.name, root)] if root.is_file() else list(_walk(root))
    if not files:
        message = f"there is no file, seen from {os.getcwd()}."
        raise data_error(key, path, message, f"a path that every slot can read, or {key}: null")
    return files


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Files below ``root`` that are not hidden, by name; skipped folders are not entered."""
    for folder, subfolders, names in os.walk(root):
        # os.walk enters what is left in this list, in this order.
        subfolders[:] = sorted(
            name for name in subfolders if name not in skipped and not name.startswith(".")
        )
        for name in sorted(name for name in names if not name.startswith(".")):
            yield Path(folder, name).relative_to(root).as_posix(), Path(folder, name)


def read_documents(path: str, *, key: str = "data.path", text_field: str = "text") -> list[Document]:
    """Read a file, or a folder recursively in the order of its names.

    By suffix: JSON lines and parquet are tables, all else is UTF-8 text. In a folder, binary files of unknown
    suffixes are skipped. Empty texts are dropped.

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
            [texts] = read_table(file, {"data.text_field": text_field}, key=key)
            documents += [Document(f"{name}:{row}", text.encode()) for row, text in enumerate(texts, 1)]
            continue
        try:
            content = file.read_bytes()
            is_named = file.suffix.lower() in TEXT_SUFFIXES or file == Path(path).expanduser()
            if is_named or b"\0" not in content[:8192]:
                content.decode("utf-8")
                documents.append(Document(name, content))
        except (OSError, UnicodeDecodeError) as error:
            fix = f"a readable file in UTF-8, e.g. by iconv -f latin1 -t utf-8 {name}; or leave it out"
            raise data_error(key, str(file), f"cannot be read: {error}.", fix) from error
    documents = [document for document in documents if document.content]
    if not documents:
        raise data_error(key, path, "there is no text in it.", "a file or folder with text in it")
    return documents


def read_table(file: Path, columns: Mapping[str, str], *, key: str = "data.path") -> list[list[Any]]:
    """The values of some columns of a table, none of them missing.

    By pyarrow, which refuses a row with too many or too few fields, and a field of mixed types.

    Args:
        file: JSON lines, CSV, TSV or parquet.
        columns: Configuration key -> the column, or field, that it names; the first one holds text.
        key: The configuration key that named the file.

    Raises:
        DataError: It cannot be read, or lacks a column or a value.
    """
    import pyarrow
    from pyarrow import csv, json, parquet, string, types

    suffix, names = file.suffix.lower(), list(columns.values())
    fix = f"one object a line, or a table, with the {' and '.join(names)} of each"
    try:
        # In one block: a value may be longer than the reader's own.
        block_size = max(2**20, file.stat().st_size)
        if suffix == PARQUET:
            table = parquet.read_table(file)
        elif suffix in DELIMITERS:
            parsing = csv.ParseOptions(delimiter=DELIMITERS[suffix], newlines_in_values=True)
            as_text = csv.ConvertOptions(column_types=dict.fromkeys(names, string()))
            table = csv.read_csv(file, csv.ReadOptions(block_size=block_size), parsing, as_text)
        else:
            # Else a text that looks like a date would be one.
            schema = json.ParseOptions(explicit_schema=pyarrow.schema([(names[0], string())]))
            table = json.read_json(file, json.ReadOptions(block_size=block_size), schema)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise data_error(key, str(file), f"cannot be read: {error}.", fix) from error
    there = ", ".join(table.column_names)
    for named_by, name in columns.items():
        if name not in table.column_names or table[name].null_count:
            message = f"a row has no {name!r}; its columns: {there}."
            raise data_error(key, str(file), message, f"{named_by}: one of {there}")
    kind = table[names[0]].type
    if not types.is_string(kind) and not types.is_large_string(kind):
        raise data_error(key, str(file), f"{names[0]!r} holds no text but {kind}.", fix)
    return [table[name].to_pylist() for name in names]


# ----------------------------------------------------------------------------------------------- the split


def split(
    samples: Sequence[T], names: Sequence[str], fraction: float, *, seed: int | None = None
) -> tuple[list[T], list[T]]:
    """Samples for training and for validation by a hash of each one's name, each in the order given.

    A sample stays on its side when others are added. Of two or more names each side gets at least one; a single
    name goes to training.

    Args:
        samples: What is split.
        names: The name of each sample; samples of the same name stay together.
        fraction: About this part of the names is for validation, in (0, 1).
        seed: Another split for each seed; None: the split of the name alone.
    """

    def place(name: str) -> float:
        """A number in [0, 1) that the name decides, uniform over names."""
        salted = name if seed is None else f"{seed}/{name}"
        digest = hashlib.sha256(salted.encode("utf-8", errors="surrogateescape")).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    places = [place(name) for name in names]
    lowest, highest = min(places, default=0.0), max(places, default=0.0)
    # The threshold moves only where one of the sides would be empty.
    threshold = min(max(fraction, math.nextafter(lowest, 2.0)), highest)
    train = [sample for sample, place in zip(samples, places, strict=True) if place >= threshold]
    validation = [sample for sample, place in zip(samples, places, strict=True) if place < threshold]
    return train, validation


def check_apart(path: str | None, validation_path: str | None) -> None:
    """Refuse a ``data.validation_path`` within ``data.path``, or the other way round."""
    if path is not None and validation_path is not None:
        train, validation = (Path(each).expanduser().resolve() for each in (path, validation_path))
        if train.is_relative_to(validation) or validation.is_relative_to(train):
            message = f"overlaps data.path = {path!r}: validation data would be trained on."
            fix = "separate the two paths; or data.validation_path: null, which splits data.path"
            raise data_error("data.validation_path", validation_path, message, fix)
