"""Hugging Face weights to start from: each rank reads what it holds, to the last bit, under every strategy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import ConfigError
from determined_ds.export.importing import import_weights
from determined_ds.protocol.checkpoint_files import checkpoints_in, damage_of
from determined_ds.protocol.tensor_index import MASTER, WEIGHT
from determined_ds.runtime.checkpoints.any_layout import stored_engine
from tests.export import trained
from tests.model_defs.causal_lm import tiny
from tests.ranks import Ranks

GPT2 = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": 32}


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


def started(kind: str, run_dir: str, hparams: dict[str, Any], data: dict[str, Any], start: str) -> int:
    """In a rank: start from a checkpoint's weights and save. Returns the bytes that were read of it."""
    from determined_ds import open_context
    from determined_ds.runtime.checkpoints.saving import Checkpoints
    from determined_ds.runtime.checkpoints.tensors_by_name import IndexedEngine
    from determined_ds.runtime.checkpoints.trial_state import TrialState

    read = 0
    parts = IndexedEngine.parts

    def counted(self: Any, *args: Any) -> Any:
        nonlocal read
        for at, part in parts(self, *args):
            read += part.numel() * part.element_size()
            yield at, part

    IndexedEngine.parts = counted  # type: ignore[method-assign]
    with open_context(
        hparams=hparams, exp_conf={"data": data}, run_dir=run_dir, accelerator="cpu"
    ) as context:
        checkpoints = Checkpoints(trained.trial_class(kind)(context), context, {}, {})
        checkpoints.fork(Path(start))
        checkpoints.save(TrialState())
    return read


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: each for file in files for name, each in safetensors.torch.load_file(file).items()}


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero3", "pipeline", "zero3-bf16"])
def test_every_strategy_starts_from_them_and_reads_no_more_than_it_holds(
    strategy: str, gpt2: Path, two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    import_weights(gpt2, tmp_path / "start")
    kind, stage = ("gpt2_pipeline", 1) if strategy == "pipeline" else ("gpt2", int(strategy[4]))
    more = {"pipe_parallel_size": 2} if strategy == "pipeline" else {}
    precision = {"overwrite_deepspeed_args": {"bf16": {"enabled": "bf16" in strategy}}}
    hparams = trained.hyperparameters(kind, stage, **more, **precision)
    read = two_ranks.run(started, kind, str(tmp_path), hparams, text, str(tmp_path / "start"))
    expected = weights_in(gpt2)
    stored = stored_engine(checkpoints_in(tmp_path / "checkpoints")[0].path / "model0")
    assert stored is not None
    for name, tensor in expected.items():
        own = stored.name_of(name)
        assert own is not None
        states = stored.index.tensors[own].states
        assert torch.equal(stored.whole(own, MASTER if MASTER in states else WEIGHT), tensor), name
    total = sum(each.nbytes for each in expected.values())
    if strategy in ("zero3", "zero3-bf16"):
        assert all(each == pytest.approx(total / 2, rel=0.01) for each in read)
    if strategy == "pipeline":
        assert max(read) < 0.65 * 2 * total  # of each weight and of its copy; both stages have the embedding


def test_a_model_built_in_partitions_starts_from_them(
    two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    """By zero.Init: no rank has held all of a parameter."""
    base = tiny.saved_model(tmp_path / "base")
    import_weights(base / "model.safetensors", tmp_path / "start")
    hparams = trained.hyperparameters("causal_lm", 3)
    read = two_ranks.run(started, "causal_lm", str(tmp_path), hparams, text, str(tmp_path / "start"))
    expected = weights_in(base)
    stored = stored_engine(checkpoints_in(tmp_path / "checkpoints")[0].path / "model0")
    assert stored is not None
    assert all(torch.equal(stored.whole(name, MASTER), tensor) for name, tensor in expected.items())
    total = sum(each.nbytes for each in expected.values())
    assert all(each == pytest.approx(total / 2, rel=0.01) for each in read)


def test_files_are_linked_and_sealed(gpt2: Path, tmp_path: Path) -> None:
    found = import_weights(gpt2, tmp_path / "start")
    assert found.linked
    names = {file.name for file in (tmp_path / "start/model0").glob("*.safetensors")}
    assert names == {file.name for file in gpt2.glob("*.safetensors")}
    for name in names:
        assert os.path.samefile(gpt2 / name, tmp_path / "start/model0" / name)
    assert damage_of(tmp_path / "start") is None


def test_names_get_a_prefix_and_some_are_left_out(tmp_path: Path) -> None:
    """As for GPT-2 in its first form, whose names lack a part, and which holds its attention masks."""
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"wte.weight": torch.ones(2), "h.0.attn.bias": torch.ones(4)}, file)
    import_weights(file, tmp_path / "start", prefix="transformer.", skip=("*.attn.bias",))
    stored = stored_engine(tmp_path / "start/model0")
    assert stored is not None
    assert list(stored.index.tensors) == ["transformer.wte.weight"]


def test_the_command(gpt2: Path, tmp_path: Path) -> None:
    words = ["checkpoint", "import", str(gpt2), "--out", str(tmp_path / "start")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "52 tensors, 3.17 MiB, linked to" in done.output
    assert "--set searcher.source_checkpoint_uuid=" in done.output
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "exists already" in done.output


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def without_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def without_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is not a whole file of safetensors: a tensor of shape (3,) lies at bytes 0 to 12 of 11"),
        (without_header, "is not a whole file of safetensors: its header has"),
        (without_shard, "model-2.safetensors is missing, which its index names"),
        (pickled, "holds no *.safetensors, only pytorch_model.bin"),
    ],
)
def test_mistakes(tmp_path: Path, damage: Any, said: str) -> None:
    (tmp_path / "given").mkdir()
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "given/model.safetensors")
    damage(tmp_path / "given")
    with pytest.raises(ConfigError) as caught:
        import_weights(tmp_path / "given", tmp_path / "start")
    assert said in str(caught.value)
    assert "fix: " in str(caught.value)
    assert not list(tmp_path.glob("*start*"))


def test_weights_of_another_model_are_refused_by_name(
    two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    base = tiny.saved_model(tmp_path / "base")
    import_weights(base, tmp_path / "start")
    run = tmp_path / "run"
    hparams = trained.hyperparameters("gpt2", 1)
    with pytest.raises(AssertionError, match=r"it has no transformer\.wpe\.weight \(32, 128\)"):
        two_ranks.run(started, "gpt2", str(run), hparams, text, str(tmp_path / "start"))
