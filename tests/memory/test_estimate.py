"""The estimate against the papers that it is taken from, and of sizes as typed."""

from __future__ import annotations

import pytest

from tests.memory.estimates import estimate, resolved
from tests.package import bytes_per_rank


@pytest.mark.parametrize("ranks", [1, 2, 64])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_model_states_are_those_of_the_zero_paper(precision: str, ranks: int) -> None:
    """arXiv 1910.02054, figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N bytes a parameter, to the byte."""
    num_parameters = 128 * 10**6
    paper = (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    for stage, bytes_a_parameter in enumerate(paper):
        found = bytes_per_rank(resolved(stage, precision, ranks=ranks), num_parameters=num_parameters)
        states = sum(found[kind] for kind in ("parameters", "gradients", "optimizer_states"))
        assert states == bytes_a_parameter * num_parameters


def test_a_block_keeps_the_bytes_of_megatrons_paper() -> None:
    """arXiv 2205.05198: 34 sbh, where attention keeps no scores; here without a vocabulary or a last norm."""
    s, b, h, layers = 2048, 4, 1024, 12
    sizes = {"num_parameters": 10**8, "num_layers": layers, "hidden_size": h, "sequence_length": s}
    norm_and_head = 2 * 2 * s * b * h
    found = bytes_per_rank(resolved(micro=b), **sizes)
    assert found["activations"] == 34 * s * b * h * layers + norm_and_head


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    model = ("--parameters", "1.3B", "--slots", 4, "--gpu-memory", "40GB")
    found = estimate(*model)
    rows = found["strategies"]
    assert [row["fits"] for row in rows] == [row["largest_micro_batch"] is not None for row in rows]
    assert found["cheapest"] == next(row["name"] for row in rows if row["fits"])
    index, size = next((i, row["largest_micro_batch"]) for i, row in enumerate(rows) if row["fits"])
    fits = [estimate(*model, "--micro-batch-size", size + n)["strategies"][index]["fits"] for n in (0, 1)]
    assert fits == [True, False]
