"""The index of a checkpoint does not grow with the ranks that wrote it."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import trained
from tests.harness.ranks import Ranks
from tests.model_defs.causal_lm import tiny


def test_twice_the_ranks_have_an_index_as_long(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    """ZeRO 3 cuts every parameter into as many equal slices as there are ranks."""
    data = {"path": tiny.text_file(tmp_path), "tokenizer": "bytes", "validation_fraction": 0.15}
    lengths = []
    for ranks, run_dir in ((two_ranks, tmp_path / "two"), (four_ranks, tmp_path / "four")):
        ranks.run(trained.train, "gpt2", str(run_dir), trained.hyperparameters("gpt2", 3), data)
        [index] = run_dir.glob("checkpoints/*/model0/index.json")
        lengths.append(index.stat().st_size)
    assert lengths[1] < 1.1 * lengths[0]
