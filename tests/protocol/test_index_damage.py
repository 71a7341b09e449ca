"""An index that does not agree with its files is damage, found before a rank starts or anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.checkpoint_files import (
    MANIFEST,
    damage_in_share,
    damage_of,
    files_of,
    fingerprint,
    newest_good_checkpoint,
    write_manifest,
)
from determined_ds.protocol.tensor_index import TRAINED, read_index, write_index
from determined_ds.runtime.checkpoints.shards import Described, Entry, index_of, write_shard
from determined_ds.runtime.checkpoints.slices import Slice

STATES = ("weight", "exp_avg")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two ranks with half of each of two tensors, as a run writes it."""
    path = tmp_path / "checkpoints/one"
    (path / "model0").mkdir(parents=True)
    entries: list[Entry] = []
    for rank in range(2):
        values = [(name, state) for name in ("a", "b") for state in STATES]
        slices = [Slice(name=n, state=s, start=2 * rank, tensor=torch.randn(2)) for n, s in values]
        entries += write_shard(path / f"model0/rank{rank}.safetensors", slices).entries
        (path / f"det_state_dict_rank{rank}.pth").write_bytes(b"part")
    kinds: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(("a", "b"), ((4,), TRAINED))
    described = Described(kinds=kinds, aliases={}, common={}, scalars={}, optimizer="AdamW")
    write_index(path / "model0", index_of([described], entries))
    (path / "model0/settings_stage0.pt").write_bytes(b"settings")
    (path / "trial_state.json").write_text('{"batches_trained": 4}')
    (path / "load_data.json").write_text(json.dumps({"written_by": {"ranks": 2}}))
    seal(path)
    return path


def seal(path: Path) -> None:
    """Write the manifest of the files as they are: the checksums are no help."""
    (path / MANIFEST).unlink(missing_ok=True)
    write_manifest(path, {name: fingerprint(path / name) for name in files_of(path)}, {"steps_completed": 4})


def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "model0/index.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


def piece(position: int, value: Any) -> Callable[[Path], None]:
    """Another value in the first piece of a tensor: file, offset, start or count."""

    def change(content: Any) -> None:
        content["tensors"]["a"]["states"]["weight"]["pieces"][0][position] = value

    return edited(change)


def swap(path: Path) -> None:
    one, other = (path / f"model0/rank{rank}.safetensors" for rank in range(2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def cut(path: Path) -> None:
    file = path / "model0/rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def index_text(text: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "model0/index.json").write_bytes(text)

    return write


def empty(path: Path) -> None:
    (path / "model0/rank1.safetensors").write_bytes(b"")


def without(name: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        (path / name).unlink()

    return remove


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "rank1.safetensors has"),
    "empty": (empty, "not a file of safetensors"),
    "swapped": (swap, "model0/rank0.safetensors does not hold"),
    "no shard": (without("model0/rank1.safetensors"), "model0/rank1.safetensors is missing"),
    "no settings": (without("model0/settings_stage0.pt"), "model0/settings_stage0.pt is missing"),
    "no part of a rank": (without("det_state_dict_rank1.pth"), "det_state_dict_rank1.pth is missing"),
    "outside": (piece(0, "../../det_state_dict_rank0.pth"), "not the name of a file in this folder"),
    "absolute": (piece(0, "/etc/hostname"), "not the name of a file in this folder"),
    "folder": (piece(0, ".."), "not the name of a file in this folder"),
    "other file": (piece(0, "rank7.safetensors"), "not in the index"),
    "other offset": (piece(1, 9), "does not hold a/weight[0:2] where the index says"),
    "behind the end": (piece(1, 10**15), "ends before a/weight[0:2]"),
    "negative offset": (piece(1, -4), "the offset of a is -4"),
    "offset of no number": (piece(1, "x"), "the offset of a is 'x'"),
    "negative count": (piece(3, -2), "the count of a is -2"),
    "gap": (piece(2, 1), "lacks elements 0 to 1 of a (weight)"),
    "no tensor": (
        edited(lambda index: index["tensors"].pop("b")),
        "b/weight[0:2], which is not in the index",
    ),
    "no state": (
        edited(lambda index: index["tensors"]["b"]["states"].pop("exp_avg")),
        "b/exp_avg[0:2], which is not in the index",
    ),
    "a stranger": (
        edited(lambda index: index["tensors"].update(c=index["tensors"]["a"])),
        "does not hold c/weight[0:2]",
    ),
    "shape": (edited(lambda index: index["tensors"]["a"].update(shape=["4"])), "the shape of a is '4'"),
    "type": (
        edited(lambda index: index["tensors"]["a"]["states"]["weight"].update(dtype="F4")),
        "a is of type 'F4'",
    ),
    "other type": (
        edited(lambda index: index["tensors"]["a"]["states"]["weight"].update(dtype="I32")),
        "does not hold a/weight[0:2]",
    ),
    "no JSON": (index_text(b"{nope"), "index.json cannot be read: it is not JSON"),
    "no text": (index_text(b"\xff\xfe\x00"), "index.json cannot be read: it is not JSON"),
    "a list": (index_text(b"[]"), "index.json cannot be read"),
    "no keys": (index_text(b'{"version": 1}'), "index.json cannot be read: it has no 'tensors'"),
    "version of no number": (edited(lambda index: index.update(version="1")), "its version is '1'"),
}


def test_what_was_written_is_intact(checkpoint: Path) -> None:
    assert damage_of(checkpoint) is None


@pytest.mark.parametrize("name", CASES)
def test_each_disagreement_is_named_even_where_all_checksums_are_right(checkpoint: Path, name: str) -> None:
    """By the launcher, and by the one of the ranks that reads the small files, which tells the others."""
    break_it, said = CASES[name]
    break_it(checkpoint)
    seal(checkpoint)
    assert said in str(damage_of(checkpoint))
    assert said in str(damage_in_share(checkpoint, 0, 2))
    assert damage_in_share(checkpoint, 1, 2) is None


def test_the_one_before_is_resumed_from(checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.parent / "two")
    swap(checkpoint.parent / "two")
    seal(checkpoint.parent / "two")
    good, damages = newest_good_checkpoint(checkpoint.parent)
    assert good is not None
    assert good.uuid == "one"
    assert "does not hold" in damages[0]


def test_one_of_a_later_version_is_not_damaged_and_is_not_passed_over(checkpoint: Path) -> None:
    edited(lambda index: index.update(version=3))(checkpoint)
    seal(checkpoint)
    for refused in (lambda: damage_of(checkpoint), lambda: read_index(checkpoint / "model0")):
        with pytest.raises(
            CheckpointError, match="version 3, and this determined_ds reads up to version 2"
        ) as told:
            refused()
        assert "fix: update determined_ds" in str(told.value)
