"""Checkpoints in S3: what is damaged or gone is found by every rank before anything is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.harness.object_storage import manager_of, names_in
from tests.harness.ranks import Ranks
from tests.interrupted.stored import fetched, train


def test_the_limit_of_checkpoints_holds_there_too_and_one_that_is_gone_is_named(
    storage: dict[str, Any], one_rank: Ranks, tmp_path: Path
) -> None:
    [(uuids, _)] = one_rank.run(train, tmp_path / "run", storage, 9, save_total_limit=2)
    left = {uuid for uuid in uuids for name in names_in(storage) if uuid in name}
    assert (len(uuids), len(left), uuids[-1] in left) == (3, 2, True)
    [gone] = {*uuids} - left
    [(_, said)] = one_rank.run(train, tmp_path / "run", storage, 12, gone)
    assert f"checkpoint {gone} is not in checkpoint_storage" in said


SETTINGS, PART, MANIFEST = "model0/settings_stage0.pt", "det_state_dict_rank1.pth", "manifest.json"
WEIGHTS, METADATA = "model0/rank0.safetensors", "metadata.json"
# What is done to an object of a checkpoint -> what is then said of it; "" where it loads all the same.
DAMAGES = {
    (SETTINGS, "missing"): f"{SETTINGS} is missing",
    (MANIFEST, "missing"): f"{MANIFEST} is missing",
    (PART, "missing"): f"{PART} is missing",
    (WEIGHTS, "flipped"): f"{WEIGHTS} is not what was written",
    (WEIGHTS, "torn"): f"{WEIGHTS} has ",
    (METADATA, "flipped"): "",  # the manifest says what it does
}


def test_what_is_damaged_or_missing_is_found_by_all_ranks(
    storage: dict[str, Any], two_ranks: Ranks, tmp_path: Path
) -> None:
    run_dir, manager = tmp_path / "run", manager_of(storage, tmp_path / "tmp")
    [([uuid], _), _] = two_ranks.run(train, run_dir, storage, 3)
    whole = fetched(storage, uuid, tmp_path / "copy")
    for (name, damage), expected in DAMAGES.items():
        content = bytearray((whole / name).read_bytes())
        content[len(content) // 2] ^= 1
        changed = tmp_path / "changed" / name
        changed.parent.mkdir(parents=True)
        changed.write_bytes(content[: len(content) // 2] if damage == "torn" else content)
        manager.delete(uuid, [name])
        if damage != "missing":
            manager.upload(tmp_path / "changed", uuid, {name})
        said = [found for _, found in two_ranks.run(train, run_dir, storage, 6, uuid)]
        assert said[0] == said[1], (name, damage)
        assert expected in said[0]
        assert ("is damaged" in said[0]) == bool(expected) == bool(said[0]), (name, damage, said)
        manager.upload(whole, uuid, {name})
        shutil.rmtree(tmp_path / "changed")
