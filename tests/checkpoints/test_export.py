"""The files of an export hold exactly the values of the checkpoint; what cannot be exported is refused beforehand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.checkpoints.command import checkpoint, succeeded
from tests.checkpoints.making import made
from tests.interrupted.compared import differences

VALUES = np.random.default_rng(1).standard_normal((7, 5)).astype("<f4")
HALF = VALUES.astype("<f2")
COUNTS = np.arange(3, dtype="<i8")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cut into slices of three ranks: 32 bits, 16 bits with their fp32 copy, whole numbers, none."""
    tensors: dict[str, Any] = {
        "plain": {"weight": ("F32", VALUES)},
        "copied": {"weight": ("F16", HALF), "fp32": ("F32", VALUES), "exp_avg": ("F32", VALUES)},
        "counts": {"weight": ("I64", COUNTS)},
        "empty": {"weight": ("F32", np.zeros((0, 4), "<f4"))},
    }
    monkeypatch.chdir(tmp_path)
    return made(tmp_path / "uuid", tensors, ranks=3, aliases={"tied": "plain"})


def exported(path: Path, to: str, *options: str | Path) -> Path:
    out = path.parent / "out"
    succeeded("export", path, "--to", to, "--output", out, *options)
    return out


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_it_holds_the_values_in_the_type_that_is_asked_for(
    to: str, dtype: torch.dtype | None, path: Path
) -> None:
    """Another type is made of the fp32 copy, not of the 16 bits; whole numbers stay."""
    options = [] if dtype is None else ["--dtype", {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]]
    out = exported(path, to, *options)
    found = weights_in(out) if to == "safetensors" else torch.load(out, weights_only=True)
    if to == "torch":
        assert found["tied"].data_ptr() == found["plain"].data_ptr()
        del found["tied"]
    expected = {
        "plain": torch.from_numpy(VALUES).to(dtype=dtype),
        "copied": torch.from_numpy(HALF if dtype is None else VALUES).to(dtype=dtype),
        "counts": torch.from_numpy(COUNTS),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    assert differences(found, expected) == []


def test_without_out_it_lies_in_the_run_and_not_in_the_context_directory(path: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    shutil.copytree(path, run / "checkpoints" / "uuid")
    (run / "best").symlink_to("checkpoints/uuid")
    said = json.loads(succeeded("export", run / "best", "--to", "torch", "--json"))
    assert Path(said["out"]) == run / "exported/uuid-torch.pt"
    assert Path(said["out"]).is_file()


def test_force_replaces_what_an_export_made_and_nothing_else(path: Path) -> None:
    out = exported(path, "safetensors")
    again = checkpoint("export", path, "--to", "safetensors", "--output", out)
    assert (again.exit_code, "exists already" in again.output) == (2, True)
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors").write_text("torn")
    exported(path, "safetensors", "--force")
    assert {file.name for file in out.iterdir()} == {".determined_ds.json", "model.safetensors", "notes.txt"}
    assert "plain" in weights_in(out)
    (out / ".determined_ds.json").unlink()
    for more in ("safetensors", "torch"):  # a folder of the user's, with files of the names of an export
        done = checkpoint("export", path, "--to", more, "--output", out, "--force")
        assert (done.exit_code, "fix: name another" in done.output) == (2, True), done.output
    assert {file.name for file in out.iterdir()} == {"model.safetensors", "notes.txt"}
    file = path.parent / "out.pt"
    file.write_text("an earlier one")
    succeeded("export", path, "--to", "torch", "--output", file, "--force")
    assert torch.load(file).keys() >= {"plain", "tied"}
    assert not list(path.parent.glob(".*"))


def flip_the_last_bytes(path: Path) -> None:
    file = path / "model0/rank1.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def make_one_too_large(path: Path) -> None:
    made(path.parent / "large", {"large": {"weight": ("F32", np.array([1.0, 1e6], "<f4"))}})


@pytest.mark.parametrize(
    ("words", "said", "before"),
    [
        ("uuid --to safetensors --output uuid/out", "lies in ", None),
        ("uuid --to safetensors --output .", "holds ", None),
        ("uuid --to torch", "is damaged: model0/rank1", flip_the_last_bytes),
        ("large --to safetensors --dtype fp16", "1e+06 is too large for fp16", make_one_too_large),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    path: Path, words: str, said: str, before: Any
) -> None:
    if before is not None:
        before(path)
    there = {*path.parent.rglob("*")}
    done = checkpoint("export", *words.split())
    assert said in done.output
    assert done.exit_code in (1, 2)
    assert {*path.parent.rglob("*")} == there


HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The configuration of a tiny GPT-2, and tensors for it, by its names: the head is not tied to the embedding."""
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=6, n_positions=4)
    config.architectures = ["GPT2LMHeadModel"]
    folder = tmp_path_factory.mktemp("config")
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    random = np.random.default_rng(1)
    return folder, {
        name: {"weight": ("F32", random.standard_normal(tuple(tensor.shape)).astype("<f4"))}
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("prefix", ["", "wrapped.inner."])
@pytest.mark.parametrize("form", ["both", "head alone", "alias"])
def test_names_are_matched_with_the_models_under_one_prefix_and_any_name_of_a_tied_weight(
    prefix: str, form: str, gpt2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config, tensors = gpt2
    stored = {prefix + name: states for name, states in {**tensors, HEAD: tensors[EMBEDDING]}.items()}
    if form != "both":
        del stored[prefix + (EMBEDDING if form == "head alone" else HEAD)]
    aliases = {prefix + HEAD: prefix + EMBEDDING} if form == "alias" else {}
    path = made(tmp_path / "uuid", stored, aliases=aliases)
    found = weights_in(exported(path, "huggingface", "--config", config))
    expected = {name: torch.from_numpy(tensors[name]["weight"][1]) for name in tensors if name != HEAD}
    assert differences(found, expected) == []


@pytest.mark.parametrize("untied", [True, False])
def test_tensors_that_are_not_the_models_are_refused_by_name(
    untied: bool, gpt2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config, tensors = gpt2
    expected = ["which the Hugging Face model ties, and they differ"]
    if not untied:
        more = {name: {"weight": ("F32", VALUES)} for name in ("transformer.ln_f.weight", "extra")}
        tensors = {**tensors, HEAD: tensors[EMBEDDING], **more}
        del tensors["transformer.ln_f.bias"]
        expected = ["transformer.ln_f.weight has shape (7, 5) in the checkpoint, and (4,) in it"]
        expected += ["transformer.ln_f.bias (4,) is not in the checkpoint", "extra (7, 5) is not in it"]
    path, out = made(tmp_path / "uuid", tensors), tmp_path / "out"
    done = checkpoint("export", path, "--to", "huggingface", "--config", config, "--output", out)
    assert done.exit_code in (1, 2)
    assert all(words in done.output for words in expected), done.output
    assert not out.exists()
