"""Ranks that share sequences train as one rank does, and go on with each other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny
from tests.model_defs.training import reported

TOLERANCE = 1e-5  # relative
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
DRY = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
# (ranks that share a sequence, ZeRO stage, hyperparameters)
KINDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "llama, ZeRO 3, blocks computed again": (2, 3, {"activation_checkpointing": True}),
    "llama, ZeRO 1, half as many heads of keys as ranks": (4, 1, {}),
    "llama, ZeRO 2, LoRA": (2, 2, {"lora": {"r": 4, "alpha": 8}}),
    "gpt2, which hands no positions on": (2, 3, {"model_config": {**GPT2, **DRY}}),
    "qwen3": (2, 3, {"model_config": {"model_type": "qwen3", "head_dim": 8, **tiny.SIZES}}),
    "mistral, a window as long as its sequences": (
        2,
        0,
        {"model_config": {"model_type": "mistral", "sliding_window": tiny.SEQUENCE_LENGTH, **tiny.SIZES}},
    ),
}


@pytest.fixture(scope="module")
def ranks(one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_rank(
    kind: str, ranks: dict[int, Ranks], data: dict[str, Any], tmp_path: Path
) -> None:
    size, stage, whole = KINDS[kind]
    more = {**whole, "sequence_parallel_size": size}
    ranks[1].run(tiny.train, tmp_path / "whole", tiny.hyperparameters(0, **whole), data)
    hparams = tiny.hyperparameters(stage, **more)
    ranks[size].run(tiny.train, tmp_path / "sliced", hparams, data)
    assert tiny.curve(tmp_path / "sliced") == pytest.approx(tiny.curve(tmp_path / "whole"), rel=TOLERANCE)


# Which ranks write a checkpoint, and which go on: (ranks, ranks that share a sequence, ZeRO stage).
WAYS = {
    "sequence 2 -> one rank": ((2, 2, 3), (1, 1, 1)),
    "one rank -> sequence 2": ((1, 1, 0), (2, 2, 2)),
    "sequence 2 -> data 2": ((2, 2, 1), (2, 1, 3)),
    "sequence 2 x data 2 -> sequence 2": ((4, 2, 3), (2, 2, 0)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_of_no_layout(
    way: str, ranks: dict[int, Ranks], data: dict[str, Any], tmp_path: Path
) -> None:
    first, then = WAYS[way]
    ranks[1].run(tiny.train, tmp_path / "whole", tiny.hyperparameters(0), data, 6)
    latest = None
    for (size, sequence, stage), batches in ((first, 3), (then, 6)):
        hparams = tiny.hyperparameters(stage, sequence_parallel_size=sequence)
        ranks[size].run(tiny.train, tmp_path / "run", hparams, data, batches, latest)
        latest = latest or tiny.checkpoint(tmp_path / "run").name
    assert reported(tmp_path / "run") == pytest.approx(reported(tmp_path / "whole"), rel=TOLERANCE)
