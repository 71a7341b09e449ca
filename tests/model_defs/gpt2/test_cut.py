"""How GPT-2's work is cut: what is computed again going backward, and what a pipeline's stages hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_defs.gpt2.model import Options
from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.training import reported, train
from tests.package import refusal


def test_an_interval_of_checkpoints_contradicts_their_switch() -> None:
    assert Options(activation_checkpointing=True).interval() == 1
    assert Options(activation_checkpoint_interval=3).interval() == 3
    both = Options(activation_checkpointing=False, activation_checkpoint_interval=2)
    assert refusal(both.interval).key == "hyperparameters.activation_checkpoint_interval"


def test_a_vocabulary_may_have_more_rows_than_there_are_tokens() -> None:
    assert [Options().vocabulary(256), Options(vocab_size=320).vocabulary(256)] == [256, 320]
    assert "256" in refusal(lambda: Options(vocab_size=255).vocabulary(256)).message


# ------------------------------------------------------------------------------------------- in ranks

COMMON = {"global_batch_size": 4, "sequence_length": 16, "learning_rate": 0.01, "warmup_num_steps": 2}
PIPELINE = {
    **COMMON,
    "pipe_parallel_size": 2,
    "deepspeed_config": "experiments/deepspeed/pipeline.json",
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
}


def refused(hparams: dict[str, Any], data: dict[str, Any], run_dir: Path) -> str:
    """In each rank: why its pipeline is not built."""
    return refusal(lambda: train(run_dir, "gpt2 in a pipeline", hparams, data, 1)).message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"partition_method": "type:Layer"},
            "matches 0 of 8 layers (TokenEmbedding, PositionEmbedding, Block",
        ),
        # Chunks are counted too; all layers together are enough.
        ({"pipe_schedule": "interleaved", "pipe_chunks": 3}, "matches 4 of 8 layers"),
    ],
)
def test_a_part_without_a_layer_that_counts_is_refused(
    more: dict[str, Any], said: str, two_ranks: Ranks, tmp_path: Path, data: dict[str, Any]
) -> None:
    for message in two_ranks.run(refused, {**PIPELINE, **more}, data, tmp_path / "run"):
        assert said in message


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
