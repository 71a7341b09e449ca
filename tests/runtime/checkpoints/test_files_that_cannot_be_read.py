"""Files of a checkpoint that are not what they should be are errors with their names, whichever way torch fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from determined_ds.errors import CheckpointError
from determined_ds.protocol.tensor_index import TRAINED, EngineIndex, StoredTensor
from determined_ds.runtime.checkpoints.contents import read_data
from determined_ds.runtime.checkpoints.foreign_files import DeepSpeedFiles
from determined_ds.runtime.checkpoints.tensors_by_name import IndexedEngine
from determined_ds.runtime.checkpoints.trial_state import read_state


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not be printed",)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04" + bytes(40), b"\x80\x02}q"])
def test_what_is_no_file_of_torchs(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "settings_stage0.pt"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"settings_stage0.pt is not what torch.save wrote.*\n  fix: "):
        read_data(file, map_location="cpu")


def test_one_that_was_cut_is_missing_or_could_run_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "det_state_dict_rank0.pth"
    with pytest.raises(CheckpointError, match=r"rank0.pth is missing\n  fix: "):
        read_data(file)
    torch.save({"values": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"rank0.pth is not what torch.save wrote"):
        read_data(file, mmap=True)
    torch.save(Harmful(), file)
    with pytest.raises(CheckpointError, match="could run code, and is not loaded"):
        read_data(file)
    assert capsys.readouterr().out == ""


def test_settings_of_something_else(tmp_path: Path) -> None:
    tensors = {"a": StoredTensor(shape=(0,), kind=TRAINED, states={})}
    torch.save({"groups": []}, tmp_path / "settings_stage0.pt")
    with pytest.raises(CheckpointError, match="does not hold the settings of an engine"):
        _ = IndexedEngine(tmp_path, EngineIndex(tensors=tensors)).settings


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{nope", "cannot be read"),
        (b"[1]", "batches_trained = None"),
        (b"{}", "batches_trained = None"),
        (b'{"batches_trained": "4"}', "batches_trained = '4'"),
        (b'{"batches_trained": 4, "kept": 3}', "kept = 3"),
    ],
)
def test_where_training_stood(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "trial_state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"(?s){said}.*\n  fix: "):
        read_state(tmp_path, "uuid")


def zero1(folder: Path, *, ranks: int = 2, written: int = 2, tied: float = 1.0) -> Path:
    """A parameter of four numbers as DeepSpeed writes it under ZeRO 1, and two layers of a pipeline that share one."""
    from deepspeed.utils.tensor_fragment import fragment_address

    folder.mkdir()
    for layer, value in ((0, 1.0), (3, tied)):
        torch.save({"embedding": torch.full((2,), value)}, folder / f"layer_0{layer}-model_states.pt")
    torch.save({"w": torch.zeros(4)}, folder / "layer_01-model_states.pt")
    shapes = [{"1.w": torch.Size([4]), "tied_modules.both.embedding": torch.Size([2])}]
    torch.save({"param_shapes": shapes, "module": {}}, folder / "mp_rank_00_model_states.pt")
    for rank in range(written):
        own = {"exp_avg": torch.zeros(3), "step": 1}
        slices = {
            "1.w": fragment_address(numel=2, start=0),
            "tied_modules.both.embedding": fragment_address(numel=1, start=2),
        }
        states = {
            "partition_count": [ranks],
            "single_partition_of_fp32_groups": [torch.zeros(3)],
            "base_optimizer_state": {"state": {0: own}, "param_groups": [{"params": [0]}]},
            "param_slice_mappings": [slices],
        }
        torch.save(
            {"optimizer_state_dict": states}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )
    return folder


def test_of_deepspeeds_own_files_one_is_missing(tmp_path: Path) -> None:
    assert DeepSpeedFiles(zero1(tmp_path / "whole")).index.aliases == {"3.embedding": "0.embedding"}
    with pytest.raises(CheckpointError, match=r"optim_states.pt of 1 ranks, and 2 wrote it\n  fix: "):
        DeepSpeedFiles(zero1(tmp_path / "less", written=1))
    with pytest.raises(CheckpointError, match=r"lacks elements 1 to 2 of 0.embedding \(fp32\)\n  fix: "):
        DeepSpeedFiles(zero1(tmp_path / "cut", written=1, ranks=1))


def test_a_tied_weight_that_differs_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"two values of the tied weight 0.embedding and 3.embedding"):
        DeepSpeedFiles(zero1(tmp_path / "model0", tied=2.0))


def test_where_the_next_one_does_not_fit_the_one_being_written_is_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was lost before; and the limit may delete one when it is complete, so there may be room then."""
    from determined_ds.runtime.checkpoints import checkpoint_writer

    done: list[str] = []
    rooms = iter([False, False])

    def check_room(*_: Any) -> None:
        done.append("room")
        if not next(rooms, True):
            raise CheckpointError("no space left")

    writer: Any = object.__new__(checkpoint_writer.CheckpointWriter)
    storage = SimpleNamespace(folder=Path("checkpoints"))
    writer._context = SimpleNamespace(
        _core=SimpleNamespace(checkpoint=SimpleNamespace(_storage_manager=storage))
    )
    writer._pending = ["being written"]
    writer.finish = lambda: done.append(writer._pending.pop())
    monkeypatch.setattr(checkpoint_writer, "check_room", check_room)
    with pytest.raises(CheckpointError, match="no space left"):
        writer._check_room()
    assert done == ["room", "being written", "room"]
