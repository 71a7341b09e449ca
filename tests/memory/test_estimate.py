"""The estimate against the papers that it is taken from, and what it says of sizes as they are typed."""

from __future__ import annotations

import pytest

from tests.memory.estimates import estimate, resolved
from tests.package import bytes_per_rank

STAGES = (0, 1, 2, 3)


def states(found: dict[str, int]) -> int:
    """Bytes of parameters, gradients and optimizer states on the device."""
    return sum(found[kind] for kind in ("parameters", "gradients", "optimizer_states"))


@pytest.mark.parametrize("ranks", [1, 2, 64])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_model_states_are_those_of_the_zero_paper(precision: str, ranks: int) -> None:
    """arXiv 1910.02054, figure 1: 16, 4 + 12/N, 2 + 14/N and 16/N bytes a parameter, to the byte."""
    num_parameters = 128 * 10**6
    paper = (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)
    for stage, bytes_a_parameter in zip(STAGES, paper, strict=True):
        found = bytes_per_rank(resolved(stage, precision, ranks=ranks), num_parameters=num_parameters)
        assert states(found) == bytes_a_parameter * num_parameters


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


@pytest.mark.parametrize("count", ["10000000", "345m", "1.5e9", "124,439,808", ".5T"])
def test_a_count_alone_gives_a_plausible_model(count: str) -> None:
    """In whichever way it is written."""
    model = estimate("--parameters", count)["model"]
    units = {"m": "e6", "T": "e12"}
    wanted = float("".join(units.get(letter, letter) for letter in count.replace(",", "")))
    layers, hidden, vocab = (model[name] for name in ("num_layers", "hidden_size", "vocab_size"))
    assert layers * (12 * hidden**2 + 13 * hidden) + vocab * hidden == pytest.approx(wanted, rel=0.35)
    assert (model["num_parameters"], hidden % model["num_heads"]) == (wanted, 0)
    assert any("layers of width" in assumption for assumption in model["assumptions"])
