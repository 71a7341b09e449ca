"""Two machines whose checkpoints go to two folders that look alike: Determined takes one of them for both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.harness.ranks import Ranks


def joined_as_machines() -> Any:
    """In a rank: the ranks, each on a machine of its own."""
    from determined_ds.devices import detect_accelerator
    from determined_ds.train.group.process_group import join_process_group

    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    return join_process_group(detect_accelerator("cpu"))


def folders_apart(folder: str, alike: bool) -> tuple[list[str], bool]:
    """In a rank: a folder of its own, which looks like the other machine's until it is made anew.

    Returns what is in it, and whether it has another inode than before.
    """
    from determined_ds.checkpoints import storage

    distributed = joined_as_machines()
    own = Path(folder, os.environ["RANK"], "checkpoint")
    (own / "model0").mkdir(parents=True)
    (own / "model0" / "part").write_text(os.environ["RANK"])
    before, identity = own.stat().st_ino, storage._identity

    def looks(path: Path) -> tuple[int, int]:
        return (1, 1) if alike and identity(path)[1] == before else identity(path)

    with patch.object(storage, "_identity", looks):
        storage.keep_apart(own, distributed)
    assert not storage.share_of(own / "model0", distributed, "part")[2]
    there = [f"{file.relative_to(own)} {file.read_text()}" for file in own.rglob("part")]
    return there, own.stat().st_ino != before


def test_folders_of_two_machines_that_look_alike_are_told_apart(two_ranks: Ranks, tmp_path: Path) -> None:
    """Determined would upload the first machine's part alone."""
    for alike in (True, False):
        (first, first_anew), (second, second_anew) = two_ranks.run(
            folders_apart, str(tmp_path / str(alike)), alike
        )
        assert (first, second) == (["model0/part 0"], ["model0/part 1"])
        assert (first_anew, second_anew) == (False, alike)
