"""The files of an export hold exactly the values of the checkpoint; what cannot be exported is refused beforehand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.checkpoints.command import checkpoint, succeeded
from tests.checkpoints.making import made, sealed

VALUES = np.random.default_rng(1).standard_normal((7, 5)).astype("<f4")
STEPS = np.arange(3, dtype="<i8")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cut into slices of three ranks: 32 bits, 16 bits with their fp32 copy, whole numbers, one number, none."""
    tensors: dict[str, Any] = {
        "plain": {"weight": ("F32", VALUES)},
        "copied": {
            "weight": ("F16", VALUES.astype("<f2")),
            "fp32": ("F32", VALUES),
            "exp_avg": ("F32", VALUES),
        },
        "counts": {"weight": ("I64", STEPS)},
        "one": {"weight": ("F32", np.float32(3).reshape(()))},
        "empty": {"weight": ("F32", np.zeros((0, 4), "<f4"))},
    }
    monkeypatch.chdir(tmp_path)
    return made(tmp_path / "uuid", tensors, ranks=3, aliases={"tied": "plain"})


def exported(path: Path, to: str, *options: str | Path) -> Path:
    out = path.parent / "out"
    succeeded("export", path, "--to", to, "--output", out, *options)
    return out


def test_plain_safetensors(path: Path) -> None:
    found = safetensors.torch.load_file(exported(path, "safetensors") / "model.safetensors")
    assert sorted(found) == ["copied", "counts", "empty", "one", "plain"]
    assert torch.equal(found["plain"], torch.from_numpy(VALUES))
    assert torch.equal(found["copied"], torch.from_numpy(VALUES.astype("<f2")))
    assert torch.equal(found["counts"], torch.from_numpy(STEPS))
    assert (found["one"].shape, float(found["one"])) == ((), 3.0)
    assert found["empty"].shape == (0, 4)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_another_type_is_made_of_the_most_exact_state(path: Path, dtype: str, expected: torch.dtype) -> None:
    """Of the fp32 copy, not of the 16 bits; whole numbers stay."""
    found = safetensors.torch.load_file(exported(path, "safetensors", "--dtype", dtype) / "model.safetensors")
    assert torch.equal(found["copied"], torch.from_numpy(VALUES).to(expected))
    assert found["counts"].dtype == torch.int64


def test_one_file_of_torchs(path: Path) -> None:
    found = torch.load(exported(path, "torch"), weights_only=True)
    assert sorted(found) == ["copied", "counts", "empty", "one", "plain", "tied"]
    assert torch.equal(found["plain"], torch.from_numpy(VALUES))
    assert torch.equal(found["counts"], torch.from_numpy(STEPS))
    assert found["tied"].data_ptr() == found["plain"].data_ptr()


def test_without_out_it_lies_in_the_run_and_not_in_the_context_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = tmp_path / "runs" / "first", tmp_path / "context"
    for checkpoints in (run / "checkpoints", run / "superseded" / "checkpoints"):
        checkpoints.mkdir(parents=True)
    shutil.copytree(path, run / "checkpoints" / "uuid")
    shutil.copytree(path, run / "superseded" / "checkpoints" / "later")
    (run / "best").symlink_to("checkpoints/uuid")
    here.mkdir()
    monkeypatch.chdir(here)
    for named, name in (("best", "uuid-torch.pt"), ("superseded/checkpoints/later", "later-torch.pt")):
        out = json.loads(succeeded("export", run / named, "--to", "torch", "--json"))["out"]
        assert Path(out) == run / "exported" / name
        assert Path(out).is_file()
    assert not list(here.iterdir())


def test_without_out_it_is_named_after_the_checkpoint_and_nothing_is_replaced(path: Path) -> None:
    first = json.loads(succeeded("export", path, "--to", "safetensors", "--json"))
    assert (first["tensors"], first["bytes"]) == (5, 238)
    assert Path(first["out"]) == path.parent / "uuid-safetensors"
    again = checkpoint("export", path, "--to", "safetensors")
    assert (again.exit_code, "exists already" in again.output) == (2, True)
    succeeded("export", path, "--to", "safetensors", "--force")
    assert not list(path.parent.glob(".*"))


def test_force_replaces_what_an_export_made_and_nothing_else(path: Path) -> None:
    out = exported(path, "safetensors")
    (out / "notes.txt").write_text("mine")
    exported(path, "safetensors", "--force")
    assert sorted(file.name for file in out.iterdir()) == [
        ".determined_ds.json",
        "model.safetensors",
        "notes.txt",
    ]
    (out / ".determined_ds.json").unlink()
    for more in ("safetensors", "torch"):  # a folder of the user's, with files of the names of an export
        done = checkpoint("export", path, "--to", more, "--output", out, "--force")
        assert (done.exit_code, "fix: name another" in done.output) == (2, True), done.output
    assert sorted(file.name for file in out.iterdir()) == ["model.safetensors", "notes.txt"]
    file = path.parent / "out.pt"
    file.write_text("an earlier one")
    succeeded("export", path, "--to", "torch", "--output", file, "--force")
    assert torch.load(file).keys() >= {"plain", "tied"}
    assert not list(path.parent.glob(".*"))


def test_columns_that_ranks_share_are_put_in_order(tmp_path: Path) -> None:
    """As tensor-parallel ranks write a matrix: each has some columns of every row."""
    path = made(tmp_path / "uuid", {"cut": {"weight": ("F32", VALUES)}})
    index = json.loads((path / "model0/index.json").read_text())
    pieces, content = [], b""
    for start, stop in ((0, 2), (2, 5)):
        columns = VALUES[:, start:stop]
        pieces.append(["rank0.bin", len(content), start, columns.size, stop - start, 5])
        content += columns.tobytes()
    index["tensors"]["cut"]["states"]["weight"]["pieces"] = pieces
    (path / "model0/index.json").write_text(json.dumps(index))
    (path / "model0/rank0.bin").write_bytes(content)
    sealed(path, 4)
    found = safetensors.torch.load_file(exported(path, "safetensors") / "model.safetensors")
    assert torch.equal(found["cut"], torch.from_numpy(VALUES))


def test_a_trial_that_lacks_a_method_is_refused(path: Path) -> None:
    (path.parent / "lacking.py").write_text(
        "import determined_ds\nclass Trial(determined_ds.DataParallelTrial): ...\n"
    )
    loaded = {"trial_cls_spec": "lacking:Trial", "hparams": {"global_batch_size": 8}, "experiment_config": {}}
    (path / "load_data.json").write_text(json.dumps(loaded))
    sealed(path, 4)
    done = checkpoint("export", path, "--to", "huggingface", "--output", path.parent / "out")
    assert done.exit_code == 2
    assert "does not define build_model, " in done.output


def flip_the_last_bytes(path: Path) -> None:
    file = path / "model0/rank1.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def make_one_too_large(path: Path) -> None:
    made(path.parent / "large", {"large": {"weight": ("F32", np.array([1.0, 1e6], "<f4"))}})


@pytest.mark.parametrize(
    ("words", "said", "before"),
    [
        (["nowhere", "--to", "torch"], "there is no such checkpoint", None),
        (["uuid", "--to", "torch", "--engine", "2"], "has no engine 2; it has: 0", None),
        (["uuid", "--to", "safetensors", "--output", "uuid/out"], "lies in ", None),
        (["uuid", "--to", "safetensors", "--output", "."], "holds ", None),
        (["uuid", "--to", "safetensors", "--merge-lora"], "--merge-lora", None),
        (["uuid", "--to", "huggingface"], "does not say what trial wrote it", None),
        (["uuid", "--to", "torch"], "is damaged: model0/rank1", flip_the_last_bytes),
        (
            ["large", "--to", "safetensors", "--dtype", "fp16"],
            "1e+06 is too large for fp16",
            make_one_too_large,
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    path: Path, words: list[str], said: str, before: Any
) -> None:
    if before is not None:
        before(path)
    there = sorted(path.parent.rglob("*"))
    done = checkpoint("export", *words)
    assert said in done.output
    assert done.exit_code in (1, 2)
    assert sorted(path.parent.rglob("*")) == there


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


HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


@pytest.mark.parametrize("prefix", ["", "model.", "wrapped.inner."])
@pytest.mark.parametrize("form", ["both", "head alone", "alias"])
def test_names_are_matched_with_the_models_under_one_prefix_and_any_name_of_a_tied_weight(
    prefix: str, form: str, gpt2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config, tensors = gpt2
    tied = tensors[EMBEDDING]
    stored = {prefix + name: states for name, states in {**tensors, HEAD: tied}.items()}
    if form != "both":
        del stored[prefix + (EMBEDDING if form == "head alone" else HEAD)]
    aliases = {prefix + HEAD: prefix + EMBEDDING} if form == "alias" else {}
    path = made(tmp_path / "uuid", stored, aliases=aliases)
    found = safetensors.torch.load_file(
        exported(path, "huggingface", "--config", config) / "model.safetensors"
    )
    assert found.keys() == tensors.keys() - {HEAD}
    for name, tensor in found.items():
        assert torch.equal(tensor, torch.from_numpy(tensors[name]["weight"][1])), name


def test_tensors_that_are_not_the_models_are_refused_by_name(
    gpt2: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    config, tensors = gpt2

    def said(name: str, given: dict[str, Any]) -> str:
        path = made(tmp_path / name, given)
        done = checkpoint(
            "export", path, "--to", "huggingface", "--config", config, "--output", tmp_path / "out"
        )
        assert done.exit_code in (1, 2)
        assert not (tmp_path / "out").exists()
        return str(done.output)

    assert "which the Hugging Face model ties, and they differ" in said("untied", tensors)
    given = {**tensors, HEAD: tensors[EMBEDDING], "extra": {"weight": ("F32", VALUES)}}
    del given["transformer.ln_f.bias"]
    given["transformer.ln_f.weight"] = {"weight": ("F32", VALUES)}
    words = said("another", given)
    assert "transformer.ln_f.weight has shape (7, 5) in the checkpoint, and (4,) in it" in words
    assert "transformer.ln_f.bias (4,) is not in the checkpoint" in words
    assert "extra (7, 5) is not in it" in words


OWN_CONFIG = """
import torch
from determined_ds import DataParallelTrial

class Trial(DataParallelTrial):
    def huggingface_config(self):
        return torch.load("config.pt", weights_only=False)

    loss = build_model = build_training_data_loader = build_validation_data_loader = None
"""


def test_a_trial_may_load_objects_of_its_own(gpt2: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Only what is read of the checkpoint is held to be data."""
    import transformers

    config, tensors = gpt2
    (tmp_path / "own_config.py").write_text(OWN_CONFIG)
    torch.save(transformers.GPT2Config.from_pretrained(config), tmp_path / "config.pt")
    loaded = {
        "trial_cls_spec": "own_config:Trial",
        "hparams": {"global_batch_size": 8},
        "experiment_config": {},
    }
    files = {"load_data.json": json.dumps(loaded)}
    path = made(tmp_path / "uuid", {**tensors, HEAD: tensors[EMBEDDING]}, files=files)
    out = exported(path, "huggingface", "--context-dir", tmp_path)
    assert json.loads((out / "config.json").read_text())["n_embd"] == 4


PROGRAM = """
import resource, sys, deepspeed, transformers, torch
from pathlib import Path
from determined_ds.cli.main import main
path = Path(sys.argv[1])
def export(name, out):
    words = [str(path / name), "--to", sys.argv[2], "--output", str(path / out), "--dtype", "bf16"]
    main(["checkpoint", "export", *words], standalone_mode=False)
export("small", "first")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export("big", "second")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long("programs that measure their memory; what an export holds is short")
@pytest.mark.programs
@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_memory_is_that_of_a_piece(tmp_path: Path, to: str) -> None:
    """Half a gigabyte in tensors of 32 MiB, of which never more than two are in memory."""
    big = np.ones(2**23, "<f4")
    made(tmp_path / "small", {"a": {"weight": ("F32", big[:8])}})
    made(tmp_path / "big", {f"w{number}": {"weight": ("F32", big)} for number in range(16)}, ranks=2)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), to]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 2 * big.nbytes
