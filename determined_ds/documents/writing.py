"""Files are written whole: one at a time, or all of them or none."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from determined_ds.errors import ConfigError, Problem


@dataclass(kw_only=True)
class _Writing:
    """One of the files that are to be written: what has been done for it, and what to undo."""

    asked: Path
    target: Path
    new: Path
    old: Path | None = None
    published: bool = False


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file aside, put it on the disk and rename it: whatever happens, it is as it was or as it should be.

    Raises:
        OSError: it cannot be written; then nothing has changed.
    """
    new = _beside(path)
    try:
        _write_new(new, content)
        os.replace(new, path)
    finally:
        _remove(new)


def write_files(texts: Mapping[Path, str], *, overwrite: bool, permission: str = "--force") -> None:
    """Write text files, all of them or none, each of them whole at any moment.

    Args:
        texts: Path -> text. Folders that are missing are made.
        overwrite: Whether files that are there are replaced.
        permission: What the user may say to have them replaced, for the message.

    Raises:
        ConfigError: one is there already, or cannot be written; all that are so. Then nothing has changed.
    """
    problems = [problem for path in texts for problem in _in_the_way(path, overwrite, permission)]
    if problems:
        raise ConfigError(problems)
    at = next(iter(texts), Path())
    folders: list[Path] = []
    writings: list[_Writing] = []
    try:
        for at, text in texts.items():
            folders += _made_folders(at.parent)
            target = Path(os.path.realpath(at))
            writing = _Writing(asked=at, target=target, new=_beside(target))
            writings.append(writing)
            _write_new(writing.new, text)
        for writing in writings:
            at = writing.asked
            _publish(writing, overwrite)
    except FileExistsError:  # it has come since it was looked for
        _undo(writings, folders)
        raise ConfigError(_exists(at, permission)) from None
    except OSError as error:
        _undo(writings, folders)
        message = f"cannot be written: {error.strerror or error}"
        fix = "name a folder that can be written to"
        raise ConfigError(Problem(key="", origin=str(at), message=message, fix=fix, code="output")) from None
    except BaseException:
        _undo(writings, folders)
        raise
    for writing in writings:
        _remove(writing.old)


def _in_the_way(path: Path, overwrite: bool, permission: str) -> Iterator[Problem]:
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # too long, below a file, or a null byte in it
        message = f"is not a writable path: {getattr(error, 'strerror', None) or error}"
        yield Problem(key="", origin=str(path), message=message, fix="give another path", code="output")
        return
    if path.is_dir():
        yield Problem(key="", origin=str(path), message="is a folder", fix="name a file", code="output")
    elif not overwrite:
        yield _exists(path, permission)


def _exists(path: Path, permission: str) -> Problem:
    fix = f"give {permission} to replace it, or another name"
    return Problem(key="", origin=str(path), message="is there already", fix=fix, code="exists")


def _made_folders(folder: Path) -> list[Path]:
    """Make a folder and its parents; those that were missing, the deepest last."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _beside(target: Path) -> Path:
    return target.with_name(f".{uuid.uuid4().hex}.tmp")


def _write_new(path: Path, content: str | bytes) -> None:
    with path.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _publish(writing: _Writing, overwrite: bool) -> None:
    if overwrite and writing.target.exists():
        writing.new.chmod(writing.target.stat().st_mode & 0o777)
        writing.old = _beside(writing.target)
        shutil.copy2(writing.target, writing.old)
    if overwrite:
        os.replace(writing.new, writing.target)
    else:
        _rename_without_replacing(writing.new, writing.target)
    writing.published = True


def _rename_without_replacing(new: Path, target: Path) -> None:
    try:
        os.link(new, target)
        new.unlink()
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        target.open("x").close()
        try:
            os.replace(new, target)
        except OSError:
            target.unlink()
            raise


def _undo(writings: list[_Writing], folders: list[Path]) -> None:
    for writing in reversed(writings):
        with contextlib.suppress(OSError):
            if writing.published and writing.old:
                os.replace(writing.old, writing.target)
            elif writing.published:
                writing.target.unlink()
        _remove(writing.old)
        _remove(writing.new)
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove(path: Path | None) -> None:
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
