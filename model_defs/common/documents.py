"""Text on disk -> documents: text files, JSON lines, parquet, folders of them, or Python's standard library.

A document is what the split keeps together: a text file, a line of JSON, a row of a table.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from determined_ds.errors import DataError
from model_defs.common.records import JSON_LINES, PARQUET, RecordReader

TEXT_SUFFIXES = frozenset({".txt", ".md", ".py", ".rst", ".text"})
# Tests are left out because distributions differ in whether they install them.
SKIPPED_LIBRARY_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
FIELD_KEY = "data.text_field"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text.

    Args:
        name: Name relative to the folder that was read, ``/`` between its parts, the same on every machine;
            with ``:line`` for lines and rows.
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
    for file in _walk(library, skipped=SKIPPED_LIBRARY_FOLDERS):
        if file.suffix != ".py":
            continue
        content = file.read_bytes()
        num_bytes += len(content)
        if num_bytes > max_bytes:
            break
        if content:
            documents.append(Document(name=file.relative_to(library).as_posix(), content=content))
    return documents


def read_documents(path: str, *, key: str = "data.path", text_field: str = "text") -> list[Document]:
    """Read a file, or a folder recursively in the order of its names.

    By suffix: ``.jsonl``, ``.ndjson`` and ``.json`` hold one JSON object a line, ``.parquet`` is a table, all
    else is UTF-8 text. In a folder, hidden files are skipped, and so are binary files of unknown suffixes.
    Empty texts are dropped.

    Args:
        path: File or folder.
        key: The configuration key that named it, for errors.
        text_field: Field of JSON objects and column of tables that holds the text.

    Raises:
        DataError: Nothing there, nothing to read in it, or content that does not match the suffix.
    """
    root = Path(path).expanduser()
    reader = RecordReader(key=key, path=path, columns={FIELD_KEY: text_field})
    documents: list[Document] = []
    if root.is_dir():
        files = [file for file in _walk(root) if not _hidden(file, root) and not _unknown_binary(file)]
        if not files:
            suffixes = ", ".join(sorted({*TEXT_SUFFIXES, *JSON_LINES, PARQUET}))
            reader.refuse("the folder holds no text files.", f"a folder with {suffixes} files")
        documents = [
            each for file in files for each in _read(reader, file, file.relative_to(root).as_posix())
        ]
    elif root.exists():
        documents = list(_read(reader, root, root.name))
    else:
        reader.refuse_path()
    if not documents and not reader.problems:
        reader.refuse("there is no text in it: it is empty.", "a file or folder with text in it")
    if reader.problems:
        raise DataError(reader.problems)
    return documents


def _read(reader: RecordReader, file: Path, name: str) -> Iterator[Document]:
    """The documents of one file, none where something is wrong with it."""
    if reader.has_enough:
        return
    if file.suffix.lower() in JSON_LINES | {PARQUET}:
        for where, record in reader.records(file, name):
            text = reader.string(where, record, FIELD_KEY)
            if text:
                yield Document(name=where, content=text.encode())
        return
    content = reader.content(file, name)
    if content:
        yield Document(name=name, content=content)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below ``root``, by name; skipped folders are not entered."""
    for folder, subfolders, names in os.walk(root):
        # os.walk enters what is left in this list, in this order.
        subfolders[:] = sorted(name for name in subfolders if name not in skipped)
        for name in sorted(names):
            yield Path(folder, name)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _unknown_binary(file: Path) -> bool:
    if file.suffix.lower() in TEXT_SUFFIXES | JSON_LINES | {PARQUET}:
        return False
    if not file.is_file():
        return True
    try:
        with file.open("rb") as opened:
            return b"\0" in opened.read(8192)
    except OSError:
        return False  # reported when it is read
