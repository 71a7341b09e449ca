"""Configuration files are read whole, and files are written whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from determined_ds.documents.document import Document, refusal
from determined_ds.documents.text import parse_json, parse_yaml
from determined_ds.errors import ConfigError, Problem


def read_yaml(
    path: Path, *, name: str | None = None, parse: Callable[[str, str], Document] = parse_yaml
) -> Document:
    """Read a YAML file whose top level is a mapping.

    Args:
        path: Of the file.
        name: What to call it in messages; its path if None.
        parse: What makes a document of its text and its name.

    Raises:
        ConfigError: the file is missing, is not UTF-8, does not parse, or repeats a key.
    """
    name = name or str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise refusal(name, "no such file", "check the path, and the current folder") from None
    except UnicodeDecodeError as error:
        place = (error.object.count(b"\n", 0, error.start) + 1, 1)
        raise refusal(name, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8", place) from None
    except (OSError, ValueError) as error:  # a ValueError: a path with a null byte in it
        reason = getattr(error, "strerror", None) or error
        raise refusal(name, f"cannot be read: {reason}", "check its path and permissions") from None
    return parse(text, name)


read_json = partial(read_yaml, parse=parse_json)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file aside, put it on the disk and rename it: whatever happens, it is as it was or as it should be.

    A link stays one, and a file that is replaced keeps its mode.

    Raises:
        OSError: it cannot be written; then nothing has changed.
    """
    target = Path(os.path.realpath(path))
    new = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with new.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(target, new)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)


def write_files(texts: Mapping[Path, str], *, overwrite: bool) -> None:
    """Write text files, each of them whole at any moment; none where one of them may not be replaced.

    Args:
        texts: Path -> text. Folders that are missing are made.
        overwrite: Whether files that are there are replaced.

    Raises:
        ConfigError: some are there already, which is said of all of them; or one cannot be written.
    """

    def refused(at: Path, message: str, fix: str, code: str = "output") -> Problem:
        return Problem(key="", origin=str(at), message=message, fix=fix, code=code)

    there = [] if overwrite else [at for at in texts if os.path.lexists(at)]
    if there:
        fix = "give --force (in Python, overwrite=True) to replace it, or another name"
        raise ConfigError(refused(at, "is there already", fix, "exists") for at in there)
    for at, text in texts.items():
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            write_whole(at, text)
        except (OSError, ValueError) as error:  # a ValueError: a path with a null byte in it
            message = f"cannot be written: {getattr(error, 'strerror', None) or error}"
            raise ConfigError(refused(at, message, "name a folder that can be written to")) from None
