"""Records on disk, as JSON lines, parquet or CSV. What cannot be read is reported by file and line."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.errors import Problem

JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
# Problems beyond these are cut: one wrong column makes every row a problem.
MAX_PROBLEMS = 10
# Of a CSV field, in characters; the module's own limit is shorter than a chapter.
FIELD_LIMIT = 2**30

Numbered = Iterator[tuple[int, Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Reads records of every format, and collects what is wrong with them.

    Args:
        key: The configuration key that named the path.
        path: The file or folder, as the configuration has it.
        columns: Configuration key -> the column, or field, that a record must have.
        problems: Found so far.
    """

    key: str
    path: str
    columns: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, message: str, fix: str) -> None:
        self.problems.append(Problem(key=self.key, value=self.path, message=message, fix=fix, code="records"))

    def refuse_path(self) -> None:
        """Report that there is nothing at the path."""
        message = f"no such file or folder, seen from {os.getcwd()}."
        self.refuse(message, f"a path that every slot can read, or {self.key}: null")

    @property
    def has_enough(self) -> bool:
        """Whether there are as many problems as are shown."""
        return len(self.problems) >= MAX_PROBLEMS

    def content(self, file: Path, name: str) -> bytes | None:
        """The bytes of a UTF-8 file; None where it is not one."""
        try:
            content = file.read_bytes()
            content.decode("utf-8")
        except OSError as error:
            self.refuse(
                f"{name} cannot be read: {error.strerror or error}.", "make it readable for every slot"
            )
        except UnicodeDecodeError as error:
            message = f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}."
            self.refuse(message, f"convert it, e.g. iconv -f latin1 -t utf-8 {name}; or leave it out")
        else:
            return content
        return None

    def records(self, file: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """``FILE:LINE`` and columns of each record that has all of :attr:`columns`."""
        for number, record in self._numbered(file, name):
            if self.has_enough:
                return
            if not self._lacks_columns(f"{name}:{number}", list(record)):
                yield f"{name}:{number}", record

    def string(self, where: str, record: Mapping[str, Any], key: str) -> str | None:
        """The text in the column of a configuration key; None where it is not a string."""
        value = record[self.columns[key]]
        if isinstance(value, str):
            # JSON can spell half a surrogate pair, which is not a character; it becomes a question mark.
            return value.encode("utf-8", "replace").decode()
        message = f"{where}: {self.columns[key]!r} is of type {type(value).__name__}, not a string."
        self.refuse(message, f"{key}: the column that holds the text")
        return None

    def _numbered(self, file: Path, name: str) -> Numbered:
        suffix = file.suffix.lower()
        if suffix == PARQUET:
            yield from self._parquet(file, name)
            return
        content = self.content(file, name)
        if content is not None:
            text = content.decode("utf-8-sig")
            yield from (
                self._json_lines(text, name)
                if suffix in JSON_LINES
                else self._csv(text, name, DELIMITERS[suffix])
            )

    def _lacks_columns(self, where: str, there: list[str]) -> bool:
        missing = {key: column for key, column in self.columns.items() if column not in there}
        if missing:
            names = ", ".join(map(str, there)) or "none"
            message = f"{where} has no {' and no '.join(map(repr, missing.values()))}; its columns: {names}."
            self.refuse(message, " and ".join(f"{key}: one of {names}" for key in missing))
        return bool(missing)

    def _csv(self, text: str, name: str, delimiter: str) -> Numbered:
        """Rows by the names in the first one, numbered by the line that they end on."""
        before = csv.field_size_limit(FIELD_LIMIT)
        try:
            reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            header = list(reader.fieldnames or ())
            if self._lacks_columns(f"{name}:1", header):
                return
            for record in reader:
                if None in record or None in record.values():
                    message = (
                        f"{name}:{reader.line_num} does not have the {len(header)} cells of the first line."
                    )
                    self.refuse(message, "quote a text that holds a comma, a quote or a line end")
                else:
                    yield reader.line_num, record
        except csv.Error as error:
            self.refuse(f"{name} is not CSV: {error}.", "quote texts, and double the quotes in them")
        finally:
            csv.field_size_limit(before)

    def _json_lines(self, text: str, name: str) -> Numbered:
        # Split at \n alone: JSON strings may hold the other line ends that str.splitlines knows.
        for number, line in enumerate(text.split("\n"), start=1):
            if self.has_enough:
                return
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.refuse(f"{name}:{number} is not JSON: {error}.", "one whole JSON object on each line")
                continue
            if isinstance(record, dict):
                yield number, record
            else:
                example = ", ".join(f'"{column}": ...' for column in self.columns.values())
                message = f"{name}:{number} is of type {type(record).__name__}, not an object."
                self.refuse(message, f"one object a line, e.g. {{{example}}}")

    def _parquet(self, file: Path, name: str) -> Numbered:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            self.refuse(f"reading {name} needs pyarrow, which is not installed.", "pip install pyarrow")
            return
        try:
            with parquet.ParquetFile(file) as opened:
                if self._lacks_columns(name, opened.schema_arrow.names):
                    return
                records = opened.read(columns=list(self.columns.values())).to_pylist()
        except OSError as error:
            self.refuse(
                f"{name} cannot be read: {error.strerror or error}.", "make it readable for every slot"
            )
        except ArrowException as error:
            self.refuse(f"{name} is not a parquet file: {error}", "write it again")
        else:
            yield from enumerate(records, start=1)
