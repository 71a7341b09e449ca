"""The files of an export hold exactly the values of the checkpoint; what cannot be exported is refused beforehand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import CheckpointError
from determined_ds.export.exporting import export
from determined_ds.export.wanted import ExportRequest
from tests.checkpoint.making import made

VALUES = np.random.default_rng(1).standard_normal((7, 5)).astype("<f4")
STEPS = np.arange(3, dtype="<i8")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
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
    return made(tmp_path / "uuid", tensors, ranks=3, aliases={"tied": "plain"})


def exported(path: Path, to: str, **more: Any) -> Path:
    return export(ExportRequest(path=path, to=to, out=path.parent / "out", **more)).out


def test_plain_safetensors(checkpoint: Path) -> None:
    found = safetensors.torch.load_file(exported(checkpoint, "safetensors") / "model.safetensors")
    assert sorted(found) == ["copied", "counts", "empty", "one", "plain"]
    assert torch.equal(found["plain"], torch.from_numpy(VALUES))
    assert torch.equal(found["copied"], torch.from_numpy(VALUES.astype("<f2")))
    assert torch.equal(found["counts"], torch.from_numpy(STEPS))
    assert (found["one"].shape, float(found["one"])) == ((), 3.0)
    assert found["empty"].shape == (0, 4)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_another_type_is_made_of_the_most_exact_state(
    checkpoint: Path, dtype: str, expected: torch.dtype
) -> None:
    """Of the fp32 copy, not of the 16 bits; whole numbers stay."""
    found = safetensors.torch.load_file(
        exported(checkpoint, "safetensors", dtype=dtype) / "model.safetensors"
    )
    assert torch.equal(found["copied"], torch.from_numpy(VALUES).to(expected))
    assert found["counts"].dtype == torch.int64


def test_shards_and_their_index(checkpoint: Path) -> None:
    out = exported(checkpoint, "safetensors", shard_bytes=200)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(file.name for file in out.glob("*.safetensors"))
    assert names == sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    for name in names:
        for tensor in safetensors.torch.load_file(out / name):
            assert index["weight_map"][tensor] == name
    assert index["metadata"]["total_size"] == 4 * 35 + 2 * 35 + 8 * 3 + 4


def test_one_file_of_torchs(checkpoint: Path) -> None:
    found = torch.load(exported(checkpoint, "torch"), weights_only=True)
    assert sorted(found) == ["copied", "counts", "empty", "one", "plain", "tied"]
    assert torch.equal(found["plain"], torch.from_numpy(VALUES))
    assert torch.equal(found["counts"], torch.from_numpy(STEPS))
    assert found["tied"].data_ptr() == found["plain"].data_ptr()


def test_a_number_too_large_for_fp16_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "uuid", {"large": {"weight": ("F32", np.array([1.0, 1e6], "<f4"))}})
    with pytest.raises(CheckpointError, match="1e\\+06 is too large for fp16\n  fix: --dtype bf16 or fp32"):
        exported(path, "safetensors", dtype="fp16")
    assert not list(tmp_path.glob("*out*"))


def test_damage_is_refused_and_nothing_is_left(checkpoint: Path) -> None:
    file = next((checkpoint / "model0").glob("rank1*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"is damaged: model0/rank1.*checksum differs"):
        exported(checkpoint, "safetensors")
    assert not list(checkpoint.parent.glob("*out*"))


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(main, ["checkpoint", "export", *map(str, words)])


def test_the_command(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default target, its words, --json, and --force."""
    monkeypatch.chdir(checkpoint.parent)
    done = invoke(checkpoint, "--to", "safetensors")
    assert done.exit_code == 0, done.output
    assert "batch 4 exported to uuid-safetensors: 5 tensors, 238 B" in done.output
    done = invoke(checkpoint, "--to", "safetensors")
    assert done.exit_code == 2
    assert "--out = " in done.output
    assert "exists already" in done.output
    done = invoke(checkpoint, "--to", "safetensors", "--force", "--json")
    assert json.loads(done.stdout)["bytes"] == 238
    assert not list(checkpoint.parent.glob(".*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--to", "torch"], "there is no such checkpoint"),
        (["uuid", "--to", "onnx"], "'onnx' is not one of 'huggingface', 'safetensors', 'torch', 'universal'"),
        (["uuid", "--to", "torch", "--engine", "2"], "has no engine 2; it has: 0"),
        (["uuid", "--to", "torch", "--dtype", "int4"], "'int4' is not one of 'fp32', 'bf16', 'fp16'"),
        (["uuid", "--to", "safetensors", "--out", "uuid/out"], "lies in the checkpoint"),
        (["uuid", "--to", "safetensors", "--out", "."], "holds the checkpoint"),
        (["uuid", "--to", "safetensors", "--merge-lora"], "--merge-lora: is for --to huggingface"),
        (["uuid", "--to", "safetensors", "--shard-size", "large"], "--shard-size = 'large'"),
        (["uuid", "--to", "universal", "--dtype", "bf16"], "hold the optimizer's fp32 weights"),
        (["uuid", "--to", "huggingface"], "does not say what trial wrote it"),
    ],
)
def test_mistakes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(checkpoint.parent)
    done = invoke(*words)
    assert said in done.output
    assert done.exit_code in (1, 2)
    assert "Traceback" not in done.output
    assert not list(checkpoint.parent.glob("*torch*"))


def test_a_tied_weight_that_differs_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=6, n_positions=4)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "config")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    random = np.random.default_rng(1)
    tensors: dict[str, Any] = {
        name: {"weight": ("F32", random.standard_normal(tuple(tensor.shape)).astype("<f4"))}
        for name, tensor in model.state_dict().items()
    }
    with pytest.raises(CheckpointError) as caught:
        exported(made(tmp_path / "differ", tensors), "huggingface", config=tmp_path / "config")
    assert "which the Hugging Face model ties, and they differ from element 0 on" in str(caught.value)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    out = exported(made(tmp_path / "same", tensors), "huggingface", config=tmp_path / "config")
    names = safetensors.torch.load_file(out / "model.safetensors").keys()
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names


PROGRAM = """
import resource, sys
from pathlib import Path
from determined_ds.export.exporting import export
from determined_ds.export.wanted import ExportRequest
import determined_ds.export.pretrained_folder, deepspeed, transformers, torch
path = Path(sys.argv[1])
export(ExportRequest(path=path.parent / "small", to=sys.argv[2], out=path.parent / "first", dtype="bf16"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export(ExportRequest(path=path, to=sys.argv[2], out=path.parent / "second", dtype="bf16"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.programs
@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_memory_is_that_of_a_piece(tmp_path: Path, to: str) -> None:
    """Half a gigabyte in tensors of 32 MiB, of which never more than two are in memory."""
    big = np.ones(2**23, "<f4")
    made(tmp_path / "small", {"a": {"weight": ("F32", big[:8])}})
    made(tmp_path / "big", {f"w{number}": {"weight": ("F32", big)} for number in range(16)}, ranks=2)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "big"), to]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) * 1024 < 2 * big.nbytes
