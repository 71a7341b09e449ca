"""A checkpoint that is not what was written is found before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.package import checkpoints, damage

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "longer": lambda content: content + b"\0",
}


def test_every_damage_to_every_file_is_found_and_named(copied: Path) -> None:
    checkpoint = checkpoints(copied / "run")[0]
    assert damage(checkpoint) is None
    # The manifest has what metadata.json says, which a master writes in another order, and people add notes to.
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "metadata.json"]
    assert len(files) >= 8
    for file in files:
        content = file.read_bytes()
        for change in DAMAGES.values():
            file.write_bytes(change(content))
            assert file.name in str(damage(checkpoint))
        file.unlink()
        assert file.name in str(damage(checkpoint))
        file.write_bytes(content)
    assert damage(checkpoint) is None
