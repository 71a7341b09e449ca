"""Text on disk -> documents: text files, JSON lines, parquet, folders of them, or Python's standard library.

A document is the unit that goes to training or to validation, never to both: a text file, a line of JSON, a
row of a table.
"""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.errors import DataError, Problem

JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PARQUET_SUFFIX = ".parquet"
TEXT_SUFFIXES = frozenset({".txt", ".md", ".py", ".rst", ".text"})
# Tests are left out because distributions differ in whether they install them.
SKIPPED_LIBRARY_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# Of more problems than this, those beyond are cut: one wrong field name makes every line a problem.
MAX_PROBLEMS = 10


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


def standard_library_description() -> str:
    """What :func:`standard_library_files` reads, for people."""
    return f"the standard library of Python {platform.python_version()}"


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
        DataError: Nothing there, nothing to read in it, or content that is not what the suffix says.
    """
    root = Path(path).expanduser()
    reader = _Reader(key=key, path=path, text_field=text_field, problems=[])
    if root.is_dir():
        files = [file for file in _walk(root) if not _hidden(file, root) and not _unknown_binary(file)]
        if not files:
            reader.refuse(
                "the folder holds no text files.",
                "a folder with .txt, .md, .py, .jsonl, .ndjson, .json or .parquet files in it",
            )
        documents = [each for file in files for each in reader.read(file, file.relative_to(root).as_posix())]
    elif root.exists():
        documents = list(reader.read(root, root.name))
    else:
        reader.refuse(
            f"no such file or folder, seen from {os.getcwd()}.",
            f"a path that every slot can read, or {key}: null",
        )
        documents = []
    if not documents and not reader.problems:
        reader.refuse("there is no text in it: it is empty.", "a file or folder with text in it")
    if reader.problems:
        raise DataError(reader.problems)
    return documents


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below ``root``, by name; skipped folders are not entered."""
    for folder, subfolders, names in os.walk(root):
        # os.walk goes on with what is left in this list, in this order.
        subfolders[:] = sorted(name for name in subfolders if name not in skipped)
        for name in sorted(names):
            yield Path(folder, name)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _unknown_binary(file: Path) -> bool:
    if file.suffix.lower() in TEXT_SUFFIXES | JSON_LINES_SUFFIXES | {PARQUET_SUFFIX}:
        return False
    if not file.is_file():
        return True
    try:
        with file.open("rb") as opened:
            return b"\0" in opened.read(8192)
    except OSError:
        return False  # Reading it will say why.


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Reads files of every format, and gathers what is wrong with them."""

    key: str
    path: str
    text_field: str
    problems: list[Problem]

    def refuse(self, message: str, fix: str) -> None:
        self.problems.append(Problem(key=self.key, value=self.path, message=message, fix=fix))

    def read(self, file: Path, name: str) -> Iterator[Document]:
        """The documents of one file, none when something is wrong with it."""
        if len(self.problems) >= MAX_PROBLEMS:
            return
        suffix = file.suffix.lower()
        try:
            if suffix == PARQUET_SUFFIX:
                yield from self._parquet(file, name)
                return
            content = file.read_bytes()
        except OSError as error:
            self.refuse(
                f"{name} cannot be read: {error.strerror or error}.", "make it readable for every slot"
            )
            return
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(
                f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}.",
                f"convert it, e.g. iconv -f latin1 -t utf-8 {name}; or leave it out",
            )
            return
        if suffix in JSON_LINES_SUFFIXES:
            yield from self._json_lines(content, name)
        elif content:
            yield Document(name=name, content=content)

    def _json_lines(self, content: bytes, name: str) -> Iterator[Document]:
        # Split at \n alone: JSON strings may hold the other line ends that str.splitlines knows.
        for number, line in enumerate(content.split(b"\n"), start=1):
            if len(self.problems) >= MAX_PROBLEMS:
                return
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.refuse(f"{where} is not JSON: {error}.", "one whole JSON object on each line")
                continue
            if not isinstance(record, dict):
                message = f"{where} is of type {type(record).__name__}, not an object."
                self.refuse(message, f'one object a line, e.g. {{"{self.text_field}": "..."}}')
            elif self.text_field not in record:
                self._refuse_fields(where, list(record))
            else:
                yield from self._text(record[self.text_field], where)

    def _parquet(self, file: Path, name: str) -> Iterator[Document]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            self.refuse(f"reading {name} needs pyarrow, which is not installed.", "pip install pyarrow")
            return
        try:
            with parquet.ParquetFile(file) as opened:
                columns = opened.schema_arrow.names
                if self.text_field not in columns:
                    self._refuse_fields(name, columns)
                    return
                texts = opened.read(columns=[self.text_field]).column(self.text_field).to_pylist()
        except ArrowException as error:
            self.refuse(f"{name} is not a parquet file: {error}", "write it again")
            return
        for number, text in enumerate(texts, start=1):
            if len(self.problems) >= MAX_PROBLEMS:
                return
            yield from self._text(text, f"{name}:{number}")

    def _text(self, text: Any, where: str) -> Iterator[Document]:
        if not isinstance(text, str):
            message = f"{where}: {self.text_field!r} is of type {type(text).__name__}, not a string."
            self.refuse(message, "data.text_field: the field that holds the text")
        elif text:
            # JSON can spell half a surrogate pair, which is no character; it becomes a question mark.
            yield Document(name=where, content=text.encode("utf-8", errors="replace"))

    def _refuse_fields(self, where: str, fields: list[str]) -> None:
        there = ", ".join(fields) or "none"
        self.refuse(
            f"{where} has no field {self.text_field!r}; the fields there are: {there}.",
            f"data.text_field: one of {there}" if fields else "put the text in it",
        )
