"""Hugging Face weights to start from: every strategy starts from exactly these bits, without a copy of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests.checkpoints import trained
from tests.checkpoints.command import checkpoint, succeeded
from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny
from tests.package import checkpoints, damage, tensors

GPT2 = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": 32}
# One batch at this rate changes no weight.
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"path": tiny.text_file(tmp_path_factory.mktemp("data")), "validation_fraction": 0.15}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's, in shards."""
    torch.manual_seed(11)
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(
        folder, max_shard_size="1MB"
    )
    return folder


def imported(given: Path, out: Path, *options: str) -> Path:
    succeeded("import", given, "--output", out, *options)
    return out


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: each for file in files for name, each in safetensors.torch.load_file(file).items()}


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """The most exact weights in the last checkpoint, by the names of the whole model."""
    found = tensors(checkpoints(run_dir)[0])
    return {name: found.get((name, "fp32"), found.get((name, "weight"))) for name, _ in found}


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "pipeline", "zero3-bf16"])
def test_every_strategy_starts_from_them(
    strategy: str, gpt2: Path, two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    start = imported(gpt2, tmp_path / "start")
    kind, stage = ("gpt2_pipeline", 1) if strategy == "pipeline" else ("gpt2", int(strategy[4]))
    more = {"pipe_parallel_size": 2} if strategy == "pipeline" else {}
    precision = {"overwrite_deepspeed_args": {"bf16": {"enabled": "bf16" in strategy}}}
    hparams = trained.hyperparameters(kind, stage, **more, **precision, **STILL)
    two_ranks.run(trained.train, kind, str(tmp_path), hparams, text, batches=1, start=str(start))
    found, expected = weights_of(tmp_path), weights_in(gpt2)
    assert len(found) == len(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_model_built_in_partitions_starts_from_them(
    two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    """By zero.Init: no rank has held all of a parameter."""
    base = tiny.saved_model(tmp_path / "base")
    start = imported(base / "model.safetensors", tmp_path / "start")
    hparams = trained.hyperparameters("causal_lm", 3, **STILL)
    two_ranks.run(trained.train, "causal_lm", str(tmp_path), hparams, text, batches=1, start=str(start))
    found, expected = weights_of(tmp_path), weights_in(base)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_of_another_model_are_refused_by_name(
    two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    start = imported(tiny.saved_model(tmp_path / "base"), tmp_path / "start")
    hparams = trained.hyperparameters("gpt2", 1)
    with pytest.raises(AssertionError, match=r"it has no transformer\.wpe\.weight \(32, 128\)"):
        two_ranks.run(trained.train, "gpt2", str(tmp_path / "run"), hparams, text, start=str(start))


# ------------------------------------------------------------------------------------------- the command


def test_files_are_linked_and_sealed_and_nothing_is_replaced(gpt2: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    said = succeeded("import", gpt2, "--output", start)
    assert "52 tensors" in said
    assert "--set searcher.source_checkpoint_uuid=" in said
    names = {file.name for file in (start / "model0").glob("*.safetensors")}
    assert names == {file.name for file in gpt2.glob("*.safetensors")}
    assert all(os.path.samefile(gpt2 / name, start / "model0" / name) for name in names)
    assert damage(start) is None
    again = checkpoint("import", gpt2, "--output", start)
    assert (again.exit_code, "exists already" in again.output) == (2, True)


def test_names_get_a_prefix_and_some_are_left_out(tmp_path: Path) -> None:
    """As for GPT-2 in its first form, whose names lack a part, and which holds its attention masks."""
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"wte.weight": torch.ones(2), "h.0.attn.bias": torch.ones(4)}, file)
    start = imported(file, tmp_path / "start", "--prefix", "transformer.", "--skip", "*.attn.bias")
    assert list(tensors(start)) == [("transformer.wte.weight", "weight")]


def test_force_replaces_what_an_import_made_and_nothing_else(gpt2: Path, tmp_path: Path) -> None:
    start = imported(gpt2, tmp_path / "start")
    (start / "notes.txt").write_text("mine")
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, file)
    imported(file, start, "--force")
    assert list(tensors(start)) == [("a", "weight")]
    assert (damage(start), (start / "notes.txt").read_text()) == (None, "mine")
    assert [each.name for each in start.glob("model0/*.safetensors")] == ["model.safetensors"]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/thesis.txt").write_text("mine")
    done = checkpoint("import", file, "--output", tmp_path / "papers", "--force")
    assert (done.exit_code, "was not made by det-ds checkpoint" in done.output) == (2, True)
    assert [each.name for each in (tmp_path / "papers").iterdir()] == ["thesis.txt"]


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def without_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def without_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def by_deepspeed(folder: Path) -> None:
    (folder / "latest").write_text("global_step2")


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (cut, "is not a whole file of safetensors"),
        (without_header, "is not a whole file of safetensors"),
        (without_shard, "model-2.safetensors is missing, which its index names"),
        (by_deepspeed, "zero_to_fp32 --safe_serialization"),
    ],
)
def test_what_is_not_whole_is_refused_and_leaves_nothing(tmp_path: Path, damaged: Any, said: str) -> None:
    (tmp_path / "given").mkdir()
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "given/model.safetensors")
    damaged(tmp_path / "given")
    done = checkpoint("import", tmp_path / "given", "--output", tmp_path / "start")
    assert (done.exit_code, said in done.output, "fix: " in done.output) == (2, True, True)
    assert not list(tmp_path.glob("*start*"))
