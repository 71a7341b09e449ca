"""Hugging Face weights to start from: every strategy starts from exactly these bits, without a copy of them."""

from __future__ import annotations

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
from tests.model_defs import tiny
from tests.package import checkpoints, damage, tensors

GPT2 = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": 32}
# One batch at this rate changes no weight.
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny.text_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's, in shards."""
    torch.manual_seed(11)
    folder = tmp_path_factory.mktemp("gpt2")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    model.save_pretrained(folder, max_shard_size="1MB")
    return folder


def imported(given: Path, out: Path, *options: str) -> Path:
    succeeded("import", given, "--output", out, *options)
    return out


@pytest.mark.parametrize("strategy", ["zero1", "zero3-bf16", "pipeline", "partitions"])
def test_every_strategy_starts_from_them(
    strategy: str, gpt2: Path, two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    """Also a model that zero.Init builds in partitions: no rank has held all of a parameter."""
    kind, stage, more, given = "gpt2", 3, dict[str, Any](), gpt2
    if strategy == "partitions":
        kind, given = "causal_lm", tiny.saved_model(tmp_path / "base")
    elif strategy == "pipeline":
        kind, stage, more = "gpt2 in a pipeline", 1, {"pipe_parallel_size": 2}
    else:
        stage = int(strategy[4])
        more = {"overwrite_deepspeed_args": {"bf16": {"enabled": "bf16" in strategy}}}
    start = imported(given, tmp_path / "start")
    hparams = trained.hyperparameters(kind, stage, **more, **STILL)
    two_ranks.run(tiny.train, tmp_path, hparams, text, 1, model=kind, fork=str(start))
    # The most exact ones in the last checkpoint, by the names of the whole model.
    stored = tensors(checkpoints(tmp_path)[0])
    found = {name: stored.get((name, "fp32"), stored.get((name, "weight"))) for name, _ in stored}
    files = (safetensors.torch.load_file(file) for file in given.glob("*.safetensors"))
    expected = {name: each for file in files for name, each in file.items()}
    assert len(found) == len(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_files_are_linked_and_sealed_and_force_replaces_only_what_an_import_made(
    gpt2: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    assert "--set searcher.source_checkpoint_uuid=" in succeeded("import", gpt2, "--output", start)
    names = {file.name for file in (start / "model0").glob("*.safetensors")}
    assert names == {file.name for file in gpt2.glob("*.safetensors")}
    assert all(os.path.samefile(gpt2 / name, start / "model0" / name) for name in names)
    assert damage(start) is None
    again = checkpoint("import", gpt2, "--output", start)
    assert (again.exit_code, "exists already" in again.output) == (2, True)
    (start / "notes.txt").write_text("mine")
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"wte.weight": torch.ones(2), "h.0.attn.bias": torch.ones(4)}, file)
    imported(file, start, "--force", "--prefix", "transformer.", "--skip", "*.attn.bias")
    assert list(tensors(start)) == [("transformer.wte.weight", "weight")]
    assert (damage(start), (start / "notes.txt").read_text()) == (None, "mine")
