"""A checkpoint that is not what was written is found out before anything is loaded from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from determined_ds.protocol.checkpoint_files import (
    MANIFEST,
    METADATA,
    checkpoints_in,
    damage_in_share,
    damage_of,
    files_of,
    fingerprint,
    metadata_text,
    newest_good_checkpoint,
    write_manifest,
)
from determined_ds.runtime.local_core import AtomicStorage

FILES = {
    "latest": b"model0",
    "model0/weights.pt": bytes(range(256)) * 40,
    "trial_state.json": b"{}\n",
    "empty": b"",
}


def checkpoint(folder: Path, uuid: str, steps: int) -> Path:
    """A sealed checkpoint."""
    path = folder / uuid
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    metadata = {"steps_completed": steps, "format": "pickle"}
    write_manifest(path, {name: fingerprint(path / name) for name in files_of(path)}, metadata)
    (path / METADATA).write_text(metadata_text(metadata))
    return path


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def longer(content: bytes) -> bytes:
    return content + b"\0"


def test_what_was_written_is_good(tmp_path: Path) -> None:
    assert damage_of(checkpoint(tmp_path, "a", 5)) is None


DAMAGES = {"torn": torn, "flipped": flipped, "longer": longer, "missing": None}
CASES = [
    (name, damage)
    for name in [*FILES, MANIFEST, METADATA]
    for damage in DAMAGES
    if FILES.get(name, b"x") or damage in ("longer", "missing")  # an empty file cannot be torn
    if (name, damage) != (METADATA, "missing")
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_every_damage_to_every_file_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoint(tmp_path, "a", 5)
    file = path / name
    change = DAMAGES[damage]
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    found = damage_of(path)
    assert found is not None
    assert Path(name).name in found


def test_metadata_may_be_missing_or_a_copy_of_the_masters(tmp_path: Path) -> None:
    """In object storage an earlier version left it out; then ``det checkpoint download`` writes what the master has."""
    path = checkpoint(tmp_path, "a", 5)
    given = {"a note": "somebody's", "format": "pickle", "steps_completed": 5}
    (path / METADATA).write_text(metadata_text(given))
    assert damage_of(path) is None
    (path / METADATA).unlink()
    assert damage_of(path) is None
    for other in ({**given, "steps_completed": 6}, {"steps_completed": 5}, {}, [], 5, None):
        (path / METADATA).write_text(json.dumps(other))
        assert METADATA in (damage_of(path) or ""), other


def test_one_bit_anywhere_in_the_manifest_is_found(tmp_path: Path) -> None:
    """Steps, sizes, checksums: the manifest vouches for itself."""
    path = checkpoint(tmp_path, "a", 5)
    content = (path / MANIFEST).read_bytes()
    for place in range(0, len(content), 7):
        (path / MANIFEST).write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        assert damage_of(path) is not None, content[place - 10 : place + 10]


def test_the_one_before_a_damaged_one_is_taken_and_it_is_said(tmp_path: Path) -> None:
    for uuid, steps in (("a", 5), ("b", 10), ("c", 15)):
        checkpoint(tmp_path, uuid, steps)
    (tmp_path / "c" / "model0" / "weights.pt").write_bytes(b"short")
    (tmp_path / "b" / METADATA).write_text("{}")
    good, damages = newest_good_checkpoint(tmp_path)
    assert good is not None
    assert (good.uuid, good.steps_completed) == ("a", 5)
    assert ["c" in damages[0], "weights.pt" in damages[0]] == [True, True]
    assert ["b" in damages[1], METADATA in damages[1]] == [True, True]


def test_one_that_is_still_being_written_is_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, ".a.partial", 5)
    assert checkpoints_in(tmp_path) == []


def test_one_of_determineds_own_loop_is_taken_on_trust(tmp_path: Path) -> None:
    """It has no manifest; but it has no ``trial_state.json`` of ours either."""
    path = tmp_path / "theirs"
    path.mkdir()
    (path / METADATA).write_text(metadata_text({"steps_completed": 4}))
    (path / "trial_state.pkl").write_bytes(b"")
    assert damage_of(path) is None
    (path / METADATA).unlink()  # as in object storage
    assert damage_of(path) is None
    (path / "trial_state.pkl").unlink()
    assert damage_of(path) == f"{METADATA} is missing"


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    """Each file is read by one of them, and together they find what one alone would."""
    path = checkpoint(tmp_path, "a", 5)
    (path / "model0" / "weights.pt").write_bytes(torn(FILES["model0/weights.pt"]))
    found = [damage_in_share(path, rank, 3) for rank in range(3)]
    assert sum(damage is not None for damage in found) == 1


def test_a_fingerprint_is_size_and_sha256(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    assert fingerprint(file) == {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}


def test_on_a_file_system_whose_number_differs_by_machine_rank_0_alone_puts_a_checkpoint_in_its_place(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    chief, other = (AtomicStorage(str(tmp_path), metrics, is_chief=is_chief) for is_chief in (True, False))
    written = chief.pre_store_path("uuid")
    (written / "part").touch()
    chief.post_store_path(written, "uuid")
    other.post_store_path(
        written, "uuid"
    )  # Determined's core context calls it on the first rank of each machine
    assert (tmp_path / "uuid" / "part").is_file()
