"""The estimate against the papers that it is taken from, and against common sense."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.estimates import estimate, refused, resolved
from tests.package import bytes_per_rank

STAGES = (0, 1, 2, 3)


def states(found: dict[str, int]) -> int:
    """Bytes of parameters, gradients and optimizer states on the device."""
    return sum(found[kind] for kind in ("parameters", "gradients", "optimizer_states"))


# ------------------------------------------------------------------------------------ the papers' numbers


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


# ------------------------------------------------------------------------------------------- common sense

LIMITS = {
    "num_parameters": (1000, 10**12),
    "num_layers": (0, 200),
    "hidden_size": (1, 2**15),
    "num_heads": (1, 128),
    "vocab_size": (0, 300_000),
    "sequence_length": (1, 2**17),
}
models = st.fixed_dictionaries({name: st.integers(*limits) for name, limits in LIMITS.items()})
sizes = st.integers(1, 64)
overlap = st.fixed_dictionaries({}, optional={"overlap_comm": st.booleans()})


@given(models, st.sampled_from(["bf16", "fp16", "fp32"]), sizes, sizes, st.integers(1, 32), overlap)
def test_no_part_of_a_strategy_costs_memory_that_should_save_it(
    model: dict[str, int], precision: str, micro: int, accumulation: int, ranks: int, zero: dict[str, Any]
) -> None:
    def found(stage: int, **more: Any) -> dict[str, int]:
        given = {"micro": micro, "accumulation": accumulation, "ranks": ranks, "zero": zero, **more}
        return bytes_per_rank(resolved(stage, precision, **given), **model)

    slack = 16 * 2 * 2 * ranks  # each part is padded to a multiple of the replicas
    here = [found(stage) for stage in STAGES]
    more_ranks = [found(stage, ranks=2 * ranks) for stage in STAGES]
    assert all(states(many) <= states(few) + slack for few, many in zip(here, more_ranks, strict=True))
    assert ranks == 1 or all(states(high) <= states(low) + slack for low, high in itertools.pairwise(here))
    for stage in STAGES[1:]:
        there = found(stage, zero={**zero, "offload_optimizer": {"device": "cpu"}})
        assert there["optimizer_states"] == here[stage]["host"] == 0
        assert there["host"] >= here[stage]["optimizer_states"]
        assert states(there) <= states(here[stage])
    assert found(0, micro=2 * micro)["activations"] >= here[0]["activations"]
    assert found(0, activation_checkpointing=True)["activations"] <= here[0]["activations"]


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    model = ("--parameters", "1.3B", "--slots", 4, "--gpu-memory", "40GB")
    found = estimate(*model)
    rows = found["strategies"]
    assert [row["fits"] for row in rows] == [row["largest_micro_batch"] is not None for row in rows]
    assert found["cheapest"] == next(row["name"] for row in rows if row["fits"])
    index, size = next((i, row["largest_micro_batch"]) for i, row in enumerate(rows) if row["fits"])
    fits = [estimate(*model, "--micro-batch-size", size + n)["strategies"][index]["fits"] for n in (0, 1)]
    assert fits == [True, False]


# ------------------------------------------------------------------------------------------- sizes as they are typed


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


@pytest.mark.parametrize("text", ["6X", "-6B", "0", "six", "inf", "6 6", ""])
@pytest.mark.parametrize("option", ["--parameters", "--gpu-memory"])
def test_what_is_not_a_number_is_refused(option: str, text: str) -> None:
    words = () if option == "--parameters" else ("--parameters", "1B")
    assert f"{option} = {text}" in refused(*words, option, text).replace("'", "")
