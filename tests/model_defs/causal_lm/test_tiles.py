"""A model computed in tiles trains as one computed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from model_defs.causal_lm.tiles import check_tiles
from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny
from tests.package import refusal

TOLERANCE = 1e-5  # relative
# 3 and 5 divide no sequence of 32 tokens.
TILES = {"tiled_mlp": 3, "tiled_loss": 5}
# ZeRO stage, and what else.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO 1": (1, {}),
    "ZeRO 2": (2, {}),
    "ZeRO 3, blocks computed again": (3, {"activation_checkpointing": True}),
    "ZeRO 3, sequence 2": (3, {"sequence_parallel_size": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_without_tiles(
    way: str, one_rank: Ranks, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    stage, more = WAYS[way]
    one_rank.run(tiny.train, tmp_path / "whole", tiny.hyperparameters(0), data)
    two_ranks.run(tiny.train, tmp_path / "tiled", tiny.hyperparameters(stage, **TILES, **more), data)
    assert tiny.curve(tmp_path / "tiled") == pytest.approx(tiny.curve(tmp_path / "whole"), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "key", "lora"),
    [
        (transformers.GPT2Config(), "tiled_mlp", False),
        (transformers.LlamaConfig(tie_word_embeddings=True), "tiled_loss", False),
        (transformers.LlamaConfig(), "tiled_mlp", True),
    ],
)
def test_what_is_not_known_to_be_right_in_tiles_is_refused(config: Any, key: str, lora: bool) -> None:
    found = refusal(lambda: check_tiles(config, **{"tiled_mlp": 1, "tiled_loss": 1, key: 2}, lora=lora))
    assert (found.key, found.fix) == (f"hyperparameters.{key}", f"{key}: 1")
