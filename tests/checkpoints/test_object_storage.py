"""Checkpoints in S3, GCS and Azure: what is damaged or gone is found by every rank before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.object_storage import clients_of, manager_of
from tests.harness.ranks import Ranks
from tests.interrupted.stored import fetched, objects_of, train


def test_the_limit_of_checkpoints_holds_there_too_and_one_that_is_gone_is_named(
    storage_of: Callable[[str], dict[str, Any]], one_rank: Ranks, tmp_path: Path
) -> None:
    storage = storage_of("gcs")
    [(uuids, _)] = one_rank.run(train, tmp_path / "run", storage, 9, save_total_limit=2)
    left = {uuid for uuid in uuids for file in objects_of(tmp_path).iterdir() if uuid in file.name}
    assert (len(uuids), len(left), uuids[-1] in left) == (3, 2, True)
    [gone] = {*uuids} - left
    [(_, said)] = one_rank.run(train, tmp_path / "run", storage, 12, gone)
    assert f"checkpoint {gone} is not in checkpoint_storage" in said


SETTINGS, PART, MANIFEST = "model0/settings_stage0.pt", "det_state_dict_rank1.pth", "manifest.json"
WEIGHTS, METADATA = "model0/rank0.safetensors", "metadata.json"
# What is done to an object of a checkpoint -> what is then said of it; "" where it loads all the same.
SHORT = {
    (PART, "missing"): f"{PART} is missing",
    (WEIGHTS, "flipped"): f"{WEIGHTS} is not what was written",
    (WEIGHTS, "torn"): f"{WEIGHTS} has ",
    (METADATA, "flipped"): "",  # the manifest says what it does
}
DAMAGES = SHORT | {
    **{(name, "missing"): f"{name} is missing" for name in (SETTINGS, WEIGHTS, MANIFEST)},
    **{(name, "flipped"): f"{name} is not what was written" for name in (PART, MANIFEST)},
}


@pytest.mark.parametrize(("kind", "cases"), [("s3", SHORT), *((kind, DAMAGES) for kind in ("gcs", "azure"))])
def test_what_is_damaged_or_missing_is_found_by_all_ranks(
    kind: str, cases: Any, storage_of: Callable[[str], dict[str, Any]], two_ranks: Ranks, tmp_path: Path
) -> None:
    storage, run_dir = storage_of(kind), tmp_path / "run"
    [([uuid], _), _] = two_ranks.run(train, run_dir, storage, 3)
    whole = fetched(storage, uuid, tmp_path / "copy")
    for (name, damage), expected in cases.items():
        content = bytearray((whole / name).read_bytes())
        content[len(content) // 2] ^= 1
        changed = tmp_path / "changed" / name
        changed.parent.mkdir(parents=True)
        changed.write_bytes(content[: len(content) // 2] if damage == "torn" else content)
        with clients_of(storage, objects_of(tmp_path)):
            manager = manager_of(storage, tmp_path / "tmp")
            manager.delete(uuid, [name])
            if damage != "missing":
                manager.upload(tmp_path / "changed", uuid, {name})
            said = [found for _, found in two_ranks.run(train, run_dir, storage, 6, uuid)]
            assert said[0] == said[1], (name, damage)
            assert expected in said[0]
            assert ("is damaged" in said[0]) == bool(expected) == bool(said[0]), (name, damage, said)
            manager.upload(whole, uuid, {name})
        shutil.rmtree(tmp_path / "changed")
