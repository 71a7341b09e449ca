"""``best`` and ``last`` in a run directory: always of a checkpoint that is there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.links import Links
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.run_dir import RunDir


class Run:
    """A run directory that checkpoints and validations are added to, and the links in it."""

    def __init__(self, path: Path, *, smaller_is_better: bool = True) -> None:
        path.mkdir(exist_ok=True)
        self.there = RunDir(path)
        self.notes: list[str] = []
        self.links = Links(
            self.there, metric="loss", smaller_is_better=smaller_is_better, note=self.notes.append
        )

    def checkpoint(self, steps: int, loss: float | None = None) -> None:
        if loss is not None:
            record = {"group": "validation", "steps_completed": steps, "metrics": {"loss": loss}}
            append_record(self.there.metrics, record)
        folder = self.there.checkpoints / f"at-{steps}"
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text(json.dumps({"steps_completed": steps}))
        self.links.update()

    @property
    def named(self) -> tuple[str | None, str | None]:
        """The targets of ``best`` and ``last``."""
        links = [self.there.path / name for name in ("best", "last")]
        best, last = (os.readlink(link) if link.is_symlink() else None for link in links)
        return best, last


def test_they_follow_what_is_best_and_newest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.links.update()
    assert run.named == (None, None)
    run.checkpoint(1)
    assert run.named == (None, "checkpoints/at-1")
    for steps, loss, best in ((2, 0.5, 2), (3, 0.7, 2), (4, 0.5, 2), (5, 0.1, 5), (6, float("nan"), 5)):
        run.checkpoint(steps, loss)
        assert run.named == (f"checkpoints/at-{best}", f"checkpoints/at-{steps}")
    assert (tmp_path / "best" / "metadata.json").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]
    assert len(checkpoints_in(run.there.checkpoints)) == 6, "links are not among them"


def test_the_larger_may_be_the_better(tmp_path: Path) -> None:
    run = Run(tmp_path, smaller_is_better=False)
    run.checkpoint(1, 0.5)
    run.checkpoint(2, 0.1)
    assert run.named == ("checkpoints/at-1", "checkpoints/at-2")


def test_they_are_right_after_pruning_and_gone_with_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for steps, loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
        run.checkpoint(steps, loss)
    shutil.rmtree(run.there.checkpoints / "at-1")
    shutil.rmtree(run.there.checkpoints / "at-3")
    run.links.update()
    assert run.named == ("checkpoints/at-2", "checkpoints/at-2")
    shutil.rmtree(run.there.checkpoints / "at-2")
    run.links.update()
    assert run.named == (None, None)


def test_they_hold_where_the_folder_is_moved(tmp_path: Path) -> None:
    run = Run(tmp_path / "here")
    run.checkpoint(1, 0.1)
    (tmp_path / "here").rename(tmp_path / "there")
    assert (tmp_path / "there" / "best" / "metadata.json").is_file()


def test_a_file_of_the_users_own_stays(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "best").mkdir()
    (tmp_path / "last").write_text("mine")
    run.checkpoint(1, 0.1)
    assert (tmp_path / "best").is_dir()
    assert (tmp_path / "last").read_text() == "mine"
    assert run.notes == []


def test_a_link_left_by_a_killed_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".best.partial").symlink_to("nowhere")
    (tmp_path / "best").symlink_to("checkpoints/gone")
    run = Run(tmp_path)
    run.checkpoint(1, 0.1)
    assert run.named == ("checkpoints/at-1", "checkpoints/at-1")


def test_a_file_system_without_links_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    run = Run(tmp_path)
    run.checkpoint(1, 0.1)
    run.checkpoint(2, 0.1)
    assert run.notes == [f"no links best and last in {tmp_path}: Operation not permitted"]
