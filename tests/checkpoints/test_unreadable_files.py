"""A file of a sealed checkpoint that is not what it should be is an error with its name, and none of it is executed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks
from tests.package import checkpoints, reseal
from tests.train.small import fit, hyperparameters, linear_trial


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not be printed",)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:2000])


def harmful(file: Path) -> None:
    torch.save(Harmful(), file)


def of_something_else(file: Path) -> None:
    torch.save({"groups": []}, file)


def of_a_later_version(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 9}))


def piece(position: int, value: Any) -> Callable[[Path], None]:
    """Another value in the first piece of a tensor: file, offset, start or count."""

    def change(file: Path) -> None:
        index = json.loads(file.read_text())
        index["tensors"]["weight"]["states"]["weight"]["pieces"][0][position] = value
        file.write_text(json.dumps(index))

    return change


SETTINGS, PART = "model0/settings_stage0.pt", "det_state_dict_rank0.pth"
STATE, INDEX = "trial_state.json", "model0/index.json"
OUTSIDE = "is not the name of a file in this folder"
# A file, what is done to it (or what it holds then), and what is said of it.
CASES: dict[str, tuple[str, Any, str]] = {
    "empty": (SETTINGS, b"", "settings_stage0.pt is not what torch.save wrote"),
    "junk": (SETTINGS, b"junk", "settings_stage0.pt is not what torch.save wrote"),
    "half a zip": (SETTINGS, b"PK\x03\x04" + bytes(40), "settings_stage0.pt is not what torch.save wrote"),
    "half a pickle": (SETTINGS, b"\x80\x02}q", "settings_stage0.pt is not what torch.save wrote"),
    "settings of something else": (SETTINGS, of_something_else, "does not hold the settings of an engine"),
    "harmful settings": (SETTINGS, harmful, "could run code, and is not loaded"),
    "a part that is missing": (PART, Path.unlink, "det_state_dict_rank0.pth is missing"),
    "a part that was cut": (PART, cut, "det_state_dict_rank0.pth is not what torch.save wrote"),
    "a harmful part": (PART, harmful, "could run code, and is not loaded"),
    "no JSON": (STATE, b"{nope", "cannot be read"),
    "a list": (STATE, b"[1]", "it does not say batches_trained"),
    "words for a number": (STATE, b'{"batches_trained": "4"}', "batches_trained = '4'"),
    "a number for a list": (STATE, b'{"batches_trained": 4, "kept": 3}', "kept = 3"),
    "half an index": (INDEX, b'{"version": 1', "index.json cannot be read: Invalid JSON"),
    "an index without tensors": (INDEX, b'{"version": 5}', "index.json cannot be read: "),
    "an index of a later version": (INDEX, of_a_later_version, "index.json cannot be read: version: "),
    "slices outside": (INDEX, piece(0, "../det_state_dict_rank0.pth"), OUTSIDE),
    "slices in a folder": (INDEX, piece(0, ".."), OUTSIDE),
    "slices with a gap": (INDEX, piece(2, 1), "lacks elements 0 to 1 of weight (weight)"),
    "a negative offset": (INDEX, piece(1, -4), "index.json cannot be read: "),
    "slices behind the end": (INDEX, piece(1, 10**9), "ends before elements 0 to "),
    "no slices": ("model0/rank0.safetensors", Path.unlink, "rank0.safetensors is missing"),
}


def train(
    run_dir: Path, kind: str = "", resume: list[Path | None] | None = None, batches: int = 2
) -> list[str]:
    """In a rank: train two batches from each of these checkpoints. Returns what was raised, or what the trial noted.

    A trial that ``reads`` has a ``load`` and a callback which read an object of their own; one that ``reads, by
    DeepSpeed`` has its engine saved by DeepSpeed alone. Any other kind is the type of a buffer that each step adds to.
    """
    from determined.pytorch import PyTorchCallback

    from determined_ds import DeterminedDSError

    noted: list[str] = []

    def read_own() -> None:
        noted.append(torch.load(run_dir / "own.pt", weights_only=False).name)

    class Reading(PyTorchCallback):
        def on_checkpoint_load_start(self, checkpoint: Any) -> None:
            read_own()

    class Reads(linear_trial()):  # type: ignore[misc]
        def build_callbacks(self) -> dict[str, Any]:
            return {"reads": Reading()}

        def load(self, context: Any, path: Path) -> None:
            read_own()
            super().load(context, path)

    class ReadsByDeepSpeed(Reads):
        def save(self, context: Any, path: Path) -> None:
            self.engine.save_checkpoint(str(path), tag="own")

        def load(self, context: Any, path: Path) -> None:
            read_own()
            self.engine.load_checkpoint(str(path), tag="own")

    class WithBuffer(linear_trial()):  # type: ignore[misc]
        def build_model(self) -> torch.nn.Module:
            model = super().build_model()
            model.register_buffer("counted", torch.zeros(3, dtype=torch.uint8).to(getattr(torch, kind)))
            return model

        def loss(self, model: Any, batch: Any) -> Any:
            counted = model.module.counted
            if model.module.training:
                counted.copy_((counted.to(torch.complex64) + 1).to(counted.dtype))
                noted[:] = [str(counted.to(torch.complex64).sum().item())]
            return super().loss(model, batch)

    kinds = {"": linear_trial(), "reads": Reads, "reads, by DeepSpeed": ReadsByDeepSpeed}
    run_dir.mkdir(exist_ok=True)
    torch.save(Path("anything"), run_dir / "own.pt")
    said = []
    for path in resume or [None]:
        noted.clear()
        try:
            how: dict[str, Any] = {
                "max_length": ("batches", batches),
                "latest_checkpoint": path and str(path),
            }
            fit(run_dir, kinds.get(kind, WithBuffer), hparams=hyperparameters(1), **how)
            said.append(", ".join(noted))
        except DeterminedDSError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def said(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a resume from each of these says; the manifest of each is that of its files as they are."""
    folder = tmp_path_factory.mktemp("checkpoints")
    assert one_rank.run(train, folder / "run") == [[""]]
    [whole] = checkpoints(folder / "run")
    paths = [folder / str(number) for number in range(len(CASES))]
    for path, (name, change, _) in zip(paths, CASES.values(), strict=True):
        shutil.copytree(whole, path)
        file = path / name
        file.write_bytes(change) if isinstance(change, bytes) else change(file)
        reseal(path)
    before = len(one_rank.said(0))
    [[*found, at_last]] = one_rank.run(train, folder / "run", "", [*paths, whole])
    assert "must not be printed" not in one_rank.said(0)[before:]
    assert at_last == "", "the same checkpoint as it was written"
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_resume_names_it(case: str, said: dict[str, str]) -> None:
    assert CASES[case][2] in said[case]
    assert "\n  fix: " in said[case]


@pytest.mark.parametrize("kind", ["reads", "reads, by DeepSpeed"])
def test_a_trial_may_load_objects_of_its_own(kind: str, one_rank: Ranks, tmp_path: Path) -> None:
    """Only files of the checkpoint are held to be data, also those that DeepSpeed reads."""
    assert one_rank.run(train, tmp_path / "run", kind) == [[""]]
    [whole] = checkpoints(tmp_path / "run")
    harmful = shutil.copytree(whole, tmp_path / "harmful")
    if kind != "reads":
        torch.save(Harmful(), next((harmful / "own").glob("*model_states.pt")))
        reseal(harmful)
    [[own, of_harmful]] = one_rank.run(train, tmp_path / "again", kind, [whole, harmful])
    assert own == "anything, anything"
    assert ("could run code, and is not loaded" in of_harmful) == (kind != "reads")


def test_a_buffer_of_an_unusual_type_is_kept_or_refused_before_training(
    one_rank: Ranks, tmp_path: Path
) -> None:
    for dtype in ("complex64", "uint16"):
        [[before]] = one_rank.run(train, tmp_path / dtype, dtype)
        [[after]] = one_rank.run(train, tmp_path / dtype, dtype, checkpoints(tmp_path / dtype), 4)
        assert complex(after) == 2 * complex(before) != 0
    [[said]] = one_rank.run(train, tmp_path / "eight bits", "float8_e8m0fnu")
    assert "buffer counted is of torch.float8_e8m0fnu" in said
    assert "persistent=False" in said
