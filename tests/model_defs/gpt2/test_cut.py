"""How GPT-2's work is cut: what is computed again going backward, and what a pipeline's stages hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.errors import ConfigError
from determined_ds.pipe.orders import Pipeline
from model_defs.common.text import next_token_loss
from model_defs.gpt2.cut import check_partition, checkpoint_interval
from model_defs.gpt2.model import (
    GPT2,
    gpt2_config,
    load_initial_weights,
    pipeline_layer_plan,
    vocab_size_of,
)
from tests.ranks import ROOT, Ranks

LAYERS = [
    planned.layer.__name__
    for planned in pipeline_layer_plan(gpt2_config("tiny", vocab_size=61, sequence_length=16))
]


@pytest.mark.parametrize(
    ("hparams", "interval"),
    [
        ({}, 0),
        ({"activation_checkpointing": True}, 1),
        ({"activation_checkpointing": False}, 0),
        ({"activation_checkpoint_interval": 3}, 3),
        ({"activation_checkpointing": True, "activation_checkpoint_interval": 2}, 2),
        ({"activation_checkpointing": False, "activation_checkpoint_interval": 0}, 0),
    ],
)
def test_intervals(hparams: dict[str, Any], interval: int) -> None:
    assert checkpoint_interval(hparams) == interval


@pytest.mark.parametrize(
    "hparams",
    [
        {"activation_checkpoint_interval": -1},
        {"activation_checkpoint_interval": True},
        {"activation_checkpoint_interval": 1.5},
        {"activation_checkpointing": "yes"},
        {"activation_checkpointing": False, "activation_checkpoint_interval": 2},
        {"activation_checkpointing": True, "activation_checkpoint_interval": 0},
    ],
)
def test_intervals_that_are_none(hparams: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpoint_interval(hparams)
    assert all(problem.fix for problem in caught.value.problems)


@pytest.mark.parametrize("interval", [1, 2, 3, 9])
def test_an_interval_changes_what_is_kept_and_nothing_of_what_is_computed(interval: int) -> None:
    config = gpt2_config("tiny", vocab_size=61, sequence_length=16, dropout=0.1)
    tokens_BT = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    results = []
    for each in (0, interval):
        model = GPT2(config).train()
        load_initial_weights(model, config, 1)
        model.activation_checkpoint_interval = each
        calls = []
        for block in model.transformer.h:
            block.register_forward_pre_hook(lambda *args, seen=calls: seen.append(1))
        torch.manual_seed(2)
        loss = next_token_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
        assert len(calls) == (8 if each else 4)
    (before, gradients), (after, again) = results
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def pipeline_of(ranks: int, chunks: int = 1) -> Pipeline:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Pipeline(schedule=schedule, ranks=ranks, micro_batches=8, chunks=chunks)


@pytest.mark.parametrize("method", ["parameters", "uniform", "type:Block", "type:block|finalnorm"])
def test_methods(method: str) -> None:
    check_partition(method, LAYERS, pipeline_of(4))
    check_partition(method, LAYERS, pipeline_of(2, chunks=2))


@pytest.mark.parametrize("method", ["type:Layer", "type:", "type:(", "layers", 3])
def test_methods_that_are_none(method: Any) -> None:
    with pytest.raises(ConfigError, match="TokenEmbedding, PositionEmbedding, Block, FinalNorm") as caught:
        check_partition(method, LAYERS, pipeline_of(2))
    assert caught.value.problems[0].fix == "partition_method: type:Block"


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError, match="at most 4, the layers that type:Block matches") as caught:
        check_partition("type:Block", LAYERS, pipeline_of(5))
    assert caught.value.problems[0].fix.startswith("pipe_parallel_size: 4 or less")


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 2)])
def test_more_parts_than_blocks(ranks: int, chunks: int) -> None:
    """Chunks are counted too; all layers together are enough."""
    says = f"{ranks} ranks x {chunks} chunks are 8 parts, and type:Block matches 4 layers"
    with pytest.raises(ConfigError, match=says) as caught:
        check_partition("type:Block", LAYERS, pipeline_of(ranks, chunks))
    [problem] = caught.value.problems
    assert problem.key == "hyperparameters.pipe_chunks"
    assert problem.fix.startswith("partition_method: uniform, which counts all 8 layers")
    check_partition("uniform", LAYERS, pipeline_of(ranks, chunks))


def test_a_vocabulary_may_have_more_rows_than_there_are_tokens() -> None:
    assert vocab_size_of({}, 256) == vocab_size_of({"vocab_size": None}, 256) == 256
    assert vocab_size_of({"vocab_size": 320}, 256) == 320
    for given in (255, True, "256"):
        with pytest.raises(ConfigError, match="at least 256, the tokens of the tokenizer"):
            vocab_size_of({"vocab_size": given}, 256)


# ------------------------------------------------------------------------------------------- in ranks


PIPELINE = {
    "pipe_parallel_size": 2,
    "deepspeed_config": "experiments/deepspeed/pipeline.json",
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
}
ZERO_3 = {
    "deepspeed_config": "experiments/deepspeed/zero3.json",
    # Small parameters would stay whole, and these are all small.
    "overwrite_deepspeed_args": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}


def train(run_dir: Path, text: str, **hparams: Any) -> list[str]:
    """Train two batches; the names of the layers that this rank has of a pipeline."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from model_defs.gpt2.trial import GPT2PipelineTrial, GPT2Trial

    with open_context(
        hparams={
            "global_batch_size": 4,
            "sequence_length": 16,
            "learning_rate": 0.01,
            "warmup_num_steps": 2,
            **hparams,
        },
        exp_conf={"data": {"path": text}, "reproducibility": {"experiment_seed": 0}},
        run_dir=run_dir,
        accelerator="cpu",
        enable_tensorboard_logging=False,
    ) as context:
        trial = (GPT2PipelineTrial if "pipe_parallel_size" in hparams else GPT2Trial)(context)
        Trainer(trial, context).fit(max_length=Batch(2), reporting_period=Batch(1), checkpoint_policy="none")
        return [type(layer).__name__ for layer in getattr(trial.engine.module, "forward_funcs", [])]


def losses_of(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"]["loss"] for line in lines if line["group"] == "training"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text()[:3000])
    return str(path)


def test_zero_3_trains_the_same_whatever_is_computed_again(
    two_ranks: Ranks, tmp_path: Path, text: str
) -> None:
    for interval in (0, 1, 3):
        hparams = {**ZERO_3, "activation_checkpoint_interval": interval}
        two_ranks.run(train, tmp_path / str(interval), text, **hparams)
        assert losses_of(tmp_path / str(interval)) == losses_of(tmp_path / "0")


def test_a_pipeline_trains_the_same_however_it_is_cut(two_ranks: Ranks, tmp_path: Path, text: str) -> None:
    cuts: dict[str, dict[str, Any]] = {
        "blocks": {},
        "uniform": {"partition_method": "uniform"},
        "parameters": {"partition_method": "parameters", "activation_checkpoint_interval": 2},
        "computed again": {"activation_checkpointing": True},
    }
    layers = {
        name: two_ranks.run(train, tmp_path / name, text, **PIPELINE, **hparams)
        for name, hparams in cuts.items()
    }
    assert [stage.count("Block") for stage in layers["blocks"]] == [2, 2]
    assert [len(stage) for stage in layers["uniform"]] == [4, 4]
    losses = {name: losses_of(tmp_path / name) for name in cuts}
    assert len(losses["blocks"]) == 2
    for name in cuts:
        assert losses[name] == pytest.approx(losses["blocks"], rel=1e-4), name
