"""How GPT-2's work is cut: what is computed again going backward, and what a pipeline's stages hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_defs.gpt2.cut import check_partition, checkpoint_interval
from model_defs.gpt2.model import gpt2_config, pipeline_layers, vocab_size_of
from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.training import reported, train
from tests.package import decide, refusal

LAYERS = [
    layer.typename.__name__
    for layer in pipeline_layers(gpt2_config("tiny", vocab_size=61, sequence_length=16))
]


def pipeline_of(ranks: int, chunks: int = 1) -> Any:
    """Its schedule, of eight micro-batches, as it is decided."""
    hparams: dict[str, Any] = {"global_batch_size": 8, "pipe_parallel_size": ranks}
    if chunks > 1:
        hparams |= {"pipe_schedule": "interleaved", "pipe_chunks": chunks}
    return decide(hparams, {"train_micro_batch_size_per_gpu": 1}, slots=ranks).strategy.pipeline


@pytest.mark.parametrize("method", ["type:Layer", "type:(", 3])
def test_methods_that_are_none(method: Any) -> None:
    check_partition("type:block|finalnorm", LAYERS, pipeline_of(2, chunks=2))
    found = refusal(lambda: check_partition(method, LAYERS, pipeline_of(2)))
    assert "TokenEmbedding, PositionEmbedding, Block, FinalNorm" in found.message
    assert found.fix == "partition_method: type:Block"


@pytest.mark.parametrize(
    ("ranks", "chunks", "key", "fix"),
    [
        (5, 1, "pipe_parallel_size", "partition_method: uniform"),
        # Chunks are counted too; all layers together are enough.
        (4, 2, "pipe_chunks", "partition_method: uniform"),
    ],
)
def test_more_parts_than_blocks(ranks: int, chunks: int, key: str, fix: str) -> None:
    found = refusal(lambda: check_partition("type:Block", LAYERS, pipeline_of(ranks, chunks)))
    assert (found.key, found.fix.startswith(fix)) == (f"hyperparameters.{key}", True)
    check_partition("uniform", LAYERS, pipeline_of(ranks, chunks))


def test_an_interval_of_checkpoints_contradicts_their_switch() -> None:
    assert checkpoint_interval({"activation_checkpointing": True}) == 1
    assert checkpoint_interval({"activation_checkpoint_interval": 3}) == 3
    both = {"activation_checkpointing": False, "activation_checkpoint_interval": 2}
    assert refusal(lambda: checkpoint_interval(both)).key == "hyperparameters.activation_checkpoint_interval"


def test_a_vocabulary_may_have_more_rows_than_there_are_tokens() -> None:
    assert vocab_size_of({}, 256) == 256
    assert vocab_size_of({"vocab_size": 320}, 256) == 320
    assert "256" in refusal(lambda: vocab_size_of({"vocab_size": 255}, 256)).message


# ------------------------------------------------------------------------------------------- in ranks

COMMON = {"global_batch_size": 4, "sequence_length": 16, "learning_rate": 0.01, "warmup_num_steps": 2}
PIPELINE = {
    **COMMON,
    "pipe_parallel_size": 2,
    "deepspeed_config": "experiments/deepspeed/pipeline.json",
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
}


def layers_of(trial: Any) -> list[str]:
    """In each rank: the layers that it has of a pipeline."""
    return [type(layer).__name__ for layer in trial.engine.module.forward_funcs]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text()[:3000])
    return {"path": str(path)}


def test_a_pipeline_trains_the_same_however_it_is_cut(
    two_ranks: Ranks, tmp_path: Path, data: dict[str, Any]
) -> None:
    cuts: dict[str, dict[str, Any]] = {
        "blocks": {},
        "uniform": {"partition_method": "uniform"},
        "parameters": {"partition_method": "parameters", "activation_checkpoint_interval": 2},
        "computed again": {"activation_checkpointing": True},
    }
    layers = {}
    for name, more in cuts.items():
        hparams = {**PIPELINE, **more}
        layers[name] = two_ranks.run(
            train, tmp_path / name, "gpt2 in a pipeline", hparams, data, 2, then=layers_of
        )
    assert [stage.count("Block") for stage in layers["blocks"]] == [2, 2]
    assert [len(stage) for stage in layers["uniform"]] == [4, 4]
    assert len(reported(tmp_path / "blocks")) == 2
    for name in cuts:
        assert reported(tmp_path / name) == pytest.approx(reported(tmp_path / "blocks"), rel=1e-4), name
