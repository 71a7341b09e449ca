"""Files of texts and labels -> rows: CSV, JSON lines, parquet. What cannot be read is named by file and row."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.errors import DataError, Problem

JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET_SUFFIX = ".parquet"
SUFFIXES = frozenset({*JSON_LINES_SUFFIXES, *DELIMITERS, PARQUET_SUFFIX})
# Of more problems than this, those beyond are cut: one wrong column makes every row a problem.
MAX_PROBLEMS = 10
# Of a CSV field, in characters; the module's own limit is shorter than a chapter.
FIELD_LIMIT = 2**30


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


@dataclass(kw_only=True)
class TableReader:
    """Reads tables of every format, and gathers what is wrong with them.

    Args:
        key: The configuration key that named the path, for errors.
        path: File; or a folder, whose files are read in the order of their names.
        text_column: Column or field of the text.
        label_column: Column or field of the label.
        problems: Found so far.
    """

    key: str
    path: str
    text_column: str
    label_column: str
    problems: list[Problem] = field(default_factory=list)

    def read(self) -> list[Row]:
        """All rows; an empty text is a text.

        Raises:
            DataError: Everything that is wrong.
        """
        root = Path(self.path).expanduser()
        files = [root]
        if root.is_dir():
            files = sorted(file for file in root.iterdir() if file.suffix.lower() in SUFFIXES)
            if not files:
                self.refuse(
                    "the folder holds no table.", f"a folder with {', '.join(sorted(SUFFIXES))} files"
                )
        elif not root.exists():
            message = f"no such file or folder, seen from {os.getcwd()}."
            self.refuse(message, "a path that every slot can read, or data.path: null")
            files = []
        rows = [row for file in files for row in self._file(file)]
        if not rows and not self.problems:
            self.refuse("there is no row in it.", "a table with rows of texts and labels")
        if self.problems:
            raise DataError(self.problems[:MAX_PROBLEMS])
        return rows

    def refuse(self, message: str, fix: str) -> None:
        self.problems.append(Problem(key=self.key, value=self.path, message=message, fix=fix, code="table"))

    def _file(self, file: Path) -> Iterator[Row]:
        suffix = file.suffix.lower()
        if suffix not in SUFFIXES:
            self.refuse(f"{file.name} is of no kind that is read.", f"one of {', '.join(sorted(SUFFIXES))}")
            return
        try:
            if suffix == PARQUET_SUFFIX:
                yield from self._rows(file.name, self._parquet(file))
                return
            content = file.read_bytes()
            text = content.decode("utf-8-sig")
        except OSError as error:
            message = f"{file.name} cannot be read: {error.strerror or error}."
            self.refuse(message, "make it readable for every slot")
            return
        except UnicodeDecodeError as error:
            message = f"{file.name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}."
            self.refuse(message, f"convert it, e.g. iconv -f latin1 -t utf-8 {file.name}")
            return
        records = self._json_lines(text, file) if suffix in JSON_LINES_SUFFIXES else self._csv(text, file)
        yield from self._rows(file.name, records)

    def _rows(self, name: str, records: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[Row]:
        """Records, numbered, whose text is a string and whose label is a name or a number."""
        for number, record in records:
            if len(self.problems) >= MAX_PROBLEMS:
                return
            where = f"{name}:{number}"
            missing = [column for column in (self.text_column, self.label_column) if column not in record]
            if missing:
                self._refuse_columns(where, missing, list(record))
                continue
            text, label = record[self.text_column], record[self.label_column]
            if not isinstance(text, str):
                message = f"{where}: {self.text_column!r} is of type {type(text).__name__}, not a string."
                self.refuse(message, "data.text_column: the column that holds the text")
            elif isinstance(label, bool) or not isinstance(label, str | int) or label == "":
                message = f"{where}: {self.label_column!r} is {label!r}, neither a name nor a whole number."
                self.refuse(message, "label every row by the name of a class, or by its number from 0")
            else:
                # JSON can spell half a surrogate pair, which is no character; it becomes a question mark.
                yield Row(name=where, text=text.encode("utf-8", "replace").decode(), label=label)

    def _refuse_columns(self, where: str, missing: list[str], there: list[str]) -> None:
        names = ", ".join(str(name) for name in there) or "none"
        keys = ["data.text_column" if name == self.text_column else "data.label_column" for name in missing]
        self.refuse(
            f"{where} has no {' and no '.join(repr(name) for name in missing)}; the columns there are: {names}.",
            f"{' and '.join(keys)}: of {names}",
        )

    # ------------------------------------------------------------------------------------------ formats

    def _csv(self, text: str, file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Rows by the names in the first one, numbered by the line that they end on."""
        before = csv.field_size_limit(FIELD_LIMIT)
        try:
            delimiter = DELIMITERS[file.suffix.lower()]
            reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            header = list(reader.fieldnames or ())
            missing = [name for name in (self.text_column, self.label_column) if name not in header]
            if missing:
                self._refuse_columns(f"{file.name}:1", missing, header)
                return
            for record in reader:
                cells = {name: value for name, value in record.items() if name is not None}
                if None in record or None in cells.values():
                    message = (
                        f"{file.name}:{reader.line_num} has not the {len(header)} cells of the first line."
                    )
                    self.refuse(message, "quote a text that holds a comma, a quote or a line end")
                else:
                    yield reader.line_num, cells
        except csv.Error as error:
            self.refuse(f"{file.name} is not CSV: {error}.", "quote texts, and double the quotes in them")
        finally:
            csv.field_size_limit(before)

    def _json_lines(self, text: str, file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # Split at \n alone: JSON strings may hold the other line ends that str.splitlines knows.
        for number, line in enumerate(text.split("\n"), start=1):
            if len(self.problems) >= MAX_PROBLEMS:
                return
            if not line.strip():
                continue
            where = f"{file.name}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.refuse(f"{where} is not JSON: {error}.", "one whole JSON object on each line")
                continue
            if isinstance(record, dict):
                yield number, record
            else:
                fix = f'one object a line, e.g. {{"{self.text_column}": "...", "{self.label_column}": 0}}'
                self.refuse(f"{where} is of type {type(record).__name__}, not an object.", fix)

    def _parquet(self, file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            message = f"reading {file.name} needs pyarrow, which is not installed."
            self.refuse(message, "pip install pyarrow")
            return
        wanted = [self.text_column, self.label_column]
        try:
            with parquet.ParquetFile(file) as opened:
                there = opened.schema_arrow.names
                missing = [name for name in wanted if name not in there]
                if missing:
                    self._refuse_columns(file.name, missing, there)
                    return
                records = opened.read(columns=wanted).to_pylist()
        except ArrowException as error:
            self.refuse(f"{file.name} is not a parquet file: {error}", "write it again")
            return
        yield from enumerate(records, start=1)
