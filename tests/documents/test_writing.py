"""Files are written whole, and all of them or none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds.documents import writing
from determined_ds.documents.writing import write_files, write_whole
from determined_ds.errors import ConfigError
from tests.making import refusal, refusals

Files = dict[str, str]


def files_in(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_folders_are_made(tmp_path: Path) -> None:
    write_files({tmp_path / "a" / "b" / "1": "one", tmp_path / "a" / "2": "two\n"}, overwrite=False)
    assert files_in(tmp_path) == {"a/b/1": "one", "a/2": "two\n"}


def test_every_file_that_is_there_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    paths[0].write_text("mine")
    paths[2].symlink_to("nowhere")
    found = refusals(lambda: write_files(dict.fromkeys(paths, "new"), overwrite=False))
    assert [problem.origin for problem in found] == [str(paths[0]), str(paths[2])]
    assert all("--force" in problem.fix for problem in found)
    assert not paths[1].exists()


def test_a_link_is_followed_where_it_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_files({tmp_path / "link": "new"}, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("step", ["_write_new", "_publish"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stop"]
)
def test_where_one_cannot_be_written_none_is(
    step: str,
    failing: int,
    overwrite: bool,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {tmp_path / "new" / "one": "1", tmp_path / "two": "2"}
    if overwrite:
        (tmp_path / "two").write_text("old")
    before = files_in(tmp_path)
    real, calls = getattr(writing, step), []

    def fails(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > failing:
            raise error
        real(*arguments)

    monkeypatch.setattr(writing, step, fails)
    with pytest.raises((ConfigError, KeyboardInterrupt)) as caught:
        write_files(texts, overwrite=overwrite)
    if isinstance(caught.value, ConfigError):
        (problem,) = caught.value.problems
        assert problem.origin == str(list(texts)[failing])
        assert problem.message == "cannot be written: No space left on device"
    assert files_in(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_one_that_comes_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writing._write_new

    def write(path: Path, text: str) -> None:
        real(path, text)
        (tmp_path / "file").write_text("theirs")

    monkeypatch.setattr(writing, "_write_new", write)
    assert (
        "is there already" in refusal(lambda: write_files({tmp_path / "file": "x"}, overwrite=False)).message
    )
    assert files_in(tmp_path) == {"file": "theirs"}


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    write_files({tmp_path / "file": "x"}, overwrite=False)
    assert files_in(tmp_path) == {"file": "x"}


def test_a_full_disk_leaves_a_file_as_it_was(small_disk: Callable[[int], Path]) -> None:
    path = small_disk(64 * 1024) / "experiment.yaml"
    write_whole(path, "old")
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new" * 64 * 1024)
    assert files_in(path.parent) == {"experiment.yaml": "old"}
    write_whole(path, b"new")
    assert files_in(path.parent) == {"experiment.yaml": "new"}
