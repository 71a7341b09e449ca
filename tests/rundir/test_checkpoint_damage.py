"""A checkpoint that is not what was written is found before anything is loaded from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import DeterminedDSError
from tests.package import checkpoints, damage, reseal
from tests.rundir.runs import scored


@pytest.fixture
def checkpoint(copied: Path) -> Path:
    """The newest checkpoint of a run of two ranks."""
    return checkpoints(copied / "run")[0]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "torn": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "longer": lambda content: content + b"\0",
}


def test_every_damage_to_every_file_is_found_and_named(checkpoint: Path) -> None:
    assert damage(checkpoint) is None
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert len(files) >= 9
    for file in files:
        content = file.read_bytes()
        for change in DAMAGES.values():
            file.write_bytes(change(content))
            assert file.name in str(damage(checkpoint))
        file.unlink()
        if file.name != "metadata.json":  # in object storage an earlier version left it out
            assert file.name in str(damage(checkpoint))
        file.write_bytes(content)
    assert damage(checkpoint) is None


def test_one_bit_anywhere_in_the_manifest_is_found(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    content = manifest.read_bytes()
    for place in range(0, len(content), 7):
        manifest.write_bytes(content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :])
        assert damage(checkpoint) is not None, content[place - 10 : place + 10]


def test_metadata_may_be_a_copy_of_the_masters(checkpoint: Path) -> None:
    """As ``det checkpoint download`` writes it: in another order, with notes; but not of other batches."""
    metadata = checkpoint / "metadata.json"
    given = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({"a note": "somebody's", **dict(sorted(given.items(), reverse=True))}))
    assert damage(checkpoint) is None
    for other in ({**given, "steps_completed": 6}, {}, [], None):
        metadata.write_text(json.dumps(other))
        assert "metadata.json" in str(damage(checkpoint)), other


def test_the_one_before_a_damaged_one_is_resumed_from_and_that_is_said(copied: Path) -> None:
    run = copied / "run"
    newest, before = checkpoints(run)
    shard = newest / "model0/rank1.safetensors"
    shard.write_bytes(DAMAGES["flipped"](shard.read_bytes()))
    fit = {"checkpoint_policy": "best", "stop_on_nan": False}
    done = scored(copied, {6: "1", 8: "1", 10: "1"}, "--resume", slots=2, **fit)
    assert done.returncode == 0, done.stderr
    assert f"{newest.name} is damaged: model0/rank1.safetensors" in done.stderr
    assert "resumed at batch 4 of 10" in done.stdout
    assert before.name not in done.stderr


def test_a_word_a_path_and_a_uuid_name_a_checkpoint(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(word: str | Path, *more: str | Path) -> str | None:
        done = CliRunner().invoke(main, ["checkpoint", "show", str(word), *map(str, more), "--json"])
        assert done.exit_code in (0, 2), done.output
        return json.loads(done.stdout)["uuid"] if done.exit_code == 0 else None

    monkeypatch.chdir(copied)
    run = copied / "runs/tiny/now"
    run.parent.mkdir(parents=True)
    (copied / "run").rename(run)
    newest, best = checkpoints(run)
    inside = ("--run-dir", run)
    assert (named("best", *inside), named("last", *inside)) == (best.name, newest.name)
    for word in (best.name, run / "checkpoints" / best.name, run / "best"):
        assert named(word) == best.name
    assert named(run) == newest.name
    assert [named(word) for word in ("nowhere", "best", "runs/other", "x" * 5000)] == [None] * 4


# ---------------------------------------------------------------------------- an index that is not of its files


def indexed(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Another content of the index."""

    def edit(path: Path) -> None:
        file = path / "model0/index.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


def piece(position: int, value: Any) -> Callable[[Path], None]:
    """Another value in the first piece of a tensor: file, offset, start or count."""

    def change(index: Any) -> None:
        index["tensors"]["weight"]["states"]["weight"]["pieces"][0][position] = value

    return indexed(change)


def swapped(path: Path) -> None:
    one, other = (path / f"model0/rank{rank}.safetensors" for rank in range(2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (text("model0/rank1.safetensors", b""), "not a file of safetensors"),
    "swapped": (swapped, "model0/rank0.safetensors"),
    "no shard": (without("model0/rank1.safetensors"), "model0/rank1.safetensors is missing"),
    "no settings": (without("model0/settings_stage0.pt"), "model0/settings_stage0.pt is missing"),
    "no part of a rank": (without("det_state_dict_rank1.pth"), "det_state_dict_rank1.pth is missing"),
    "outside": (piece(0, "../../det_state_dict_rank0.pth"), "not the name of a file in this folder"),
    "absolute": (piece(0, "/etc/hostname"), "not the name of a file in this folder"),
    "folder": (piece(0, ".."), "not the name of a file in this folder"),
    "other file": (piece(0, "rank7.safetensors"), "not in the index"),
    "other offset": (piece(1, 9), "does not hold weight/weight[0:"),
    "behind the end": (piece(1, 10**15), "ends before weight/weight[0:"),
    "negative offset": (piece(1, -4), "the offset of weight is -4"),
    "offset of no number": (piece(1, "x"), "the offset of weight is 'x'"),
    "negative count": (piece(3, -2), "the count of weight is -2"),
    "gap": (piece(2, 1), "lacks elements 0 to 1 of weight (weight)"),
    "no tensor": (indexed(lambda index: index["tensors"].pop("bias")), "which is not in the index"),
    "no state": (
        indexed(lambda index: index["tensors"]["bias"]["states"].pop("exp_avg")),
        "bias/exp_avg[0:3], which is not in the index",
    ),
    "a stranger": (
        indexed(lambda index: index["tensors"].update(other=index["tensors"]["weight"])),
        "does not hold other/weight[0:",
    ),
    "shape": (indexed(lambda index: index["tensors"]["weight"].update(shape=["4"])), "the shape of weight"),
    "other type": (
        indexed(lambda index: index["tensors"]["weight"]["states"]["weight"].update(dtype="I32")),
        "does not hold weight/weight[0:",
    ),
    "no JSON": (text("model0/index.json", b"{nope"), "index.json cannot be read: it is not JSON"),
    "a list": (text("model0/index.json", b"[]"), "index.json cannot be read"),
    "no keys": (text("model0/index.json", b'{"version": 1}'), "it has no 'tensors'"),
    "version of no number": (indexed(lambda index: index.update(version="1")), "its version is '1'"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_disagreement_is_named_even_where_all_checksums_are_right(checkpoint: Path, name: str) -> None:
    break_it, said = CASES[name]
    break_it(checkpoint)
    reseal(checkpoint)
    assert said in str(damage(checkpoint))


def test_a_checkpoint_of_a_later_version_is_refused_and_not_passed_over(checkpoint: Path) -> None:
    indexed(lambda index: index.update(version=4))(checkpoint)
    reseal(checkpoint)
    with pytest.raises(DeterminedDSError, match=r"version 4.*\n.*fix: update determined_ds"):
        damage(checkpoint)
