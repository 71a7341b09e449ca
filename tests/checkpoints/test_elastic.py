"""A checkpoint's engines are read by any number of ranks under any strategy, bit for bit.

On real engines: one, two and four ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.strategies import BATCH, PAIRS, ZERO, run
from tests.harness.ranks import Ranks
from tests.package import tensors

STEPS = 3


@pytest.fixture(scope="module")
def ranks(one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def values(path: Path, engine: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """As :func:`tensors`, of each weight only its most exact value: some strategies write no other."""
    found = tensors(path, engine)
    exact = {name: value for (name, state), value in found.items() if state == "fp32"}
    rest = {key: value for key, value in found.items() if key[1] != "fp32"}
    return {**rest, **{(name, "weight"): value for name, value in exact.items()}}


def differing(path: Path, other: Path, engine: int = 0) -> list[tuple[str, str]]:
    """What both checkpoints hold, and with other values."""
    one, two = values(path, engine), values(other, engine)
    return [key for key in one if key in two and not torch.equal(one[key].float(), two[key].float())]


def sizes_of(strategy: Mapping[str, Any]) -> list[int]:
    """The numbers of ranks on which it runs."""
    least = strategy["zero"].get("zero_hpz_partition_size", strategy.get("pipe", strategy.get("tensor", 1)))
    return [size for size in (1, 2, 4) if size >= least]


# Every kind of cut, on fewer ranks than its checkpoint came from, as many, and more.
PLACES = [
    ("zero3", 1),
    ("zero3", 4),
    ("bf16_zero2", 2),
    ("pipe2_zero1", 4),
    ("dualpipev", 2),
    ("tensor2_zero1", 4),
]


@pytest.mark.parametrize(("name", "size"), PLACES)
def test_there_and_back(name: str, size: int, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """What ZeRO 1 on two ranks wrote, read and written by another strategy, is read back bit for bit."""
    half = {"bf16": True} if name.startswith("bf16") else {}
    home, away = {"zero": {"stage": 1}, **half}, ZERO[name]
    first, there, back = (tmp_path / each for each in ("first", "there", "back"))
    ranks[2].run(run, home, str(tmp_path), write=str(first), steps=STEPS)
    whole, *_ = ranks[2].run(run, home, str(tmp_path), read=str(first), first=STEPS, steps=2)
    ranks[size].run(run, away, str(tmp_path), read=str(first), write=str(there))
    assert values(there).keys() == values(first).keys()
    assert differing(first, there) == []
    ranks[2].run(run, home, str(tmp_path), read=str(there), write=str(back))
    assert tensors(back).keys() == tensors(first).keys()
    assert differing(first, back) == []
    losses, *_ = ranks[size].run(run, away, str(tmp_path), read=str(first), first=STEPS, steps=2)
    assert losses == pytest.approx(whole, abs=2e-2 if half else 1e-6)


def walk(strategies: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], int, int]]:
    """Every strategy on every number of ranks, in a random order: name, strategy, ranks, micro-batch."""
    draw = random.Random(18)
    places = [(name, size) for name, strategy in strategies.items() for size in sizes_of(strategy)]
    for name, size in draw.sample(places, len(places)):
        shared = strategies[name].get("pipe", 1) * strategies[name].get("tensor", 1)
        own = BATCH // (size // shared)
        micro = draw.choice([each for each in (1, 2, 4, 8) if own % each == 0])
        yield name, strategies[name], size, micro


GROUPS = {
    "fp32": {name: strategy for name, strategy in ZERO.items() if not strategy.get("bf16")},
    "bf16": {name: strategy for name, strategy in ZERO.items() if strategy.get("bf16")},
    "two engines": PAIRS,
}
HOMES: dict[str, dict[str, Any]] = {
    "fp32": {"zero": {"stage": 1}},
    "bf16": {"zero": {"stage": 1}, "bf16": True},
    "two engines": PAIRS["1 and 3"],
}
ONE_HUB = "test_there_and_back has every kind of cut, each from the same strategy"


@pytest.mark.long(ONE_HUB)
@pytest.mark.parametrize("group", GROUPS)
def test_through_all_of_them_in_any_order(group: str, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """Each reads what the one before wrote; all hold the same bits, and home again training continues as if at home."""
    home, num_engines = HOMES[group], 2 if group == "two engines" else 1
    first = at = tmp_path / "first"
    ranks[2].run(run, home, str(tmp_path), write=str(first), steps=STEPS)
    whole, *_ = ranks[2].run(run, home, str(tmp_path), steps=STEPS + 2)
    for number, (name, strategy, size, micro) in enumerate(walk(GROUPS[group])):
        there = tmp_path / str(number)
        ranks[size].run(run, strategy, str(tmp_path), read=str(at), write=str(there), micro=micro)
        for engine in range(num_engines):
            assert differing(first, there, engine) == [], f"{name} on {size}, number {number} of the walk"
            assert values(there, engine).keys() == values(first, engine).keys(), f"{name} on {size}"
        at = there
    losses, *_ = ranks[2].run(run, home, str(tmp_path), read=str(at), first=STEPS, steps=2)
    assert losses == whole[STEPS:]


@pytest.mark.long(ONE_HUB)
@pytest.mark.parametrize("name", GROUPS["bf16"])
def test_by_way_of_16_bits_nothing_that_is_trained_is_lost(
    name: str, ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    """A training in fp32 is read in bf16, which keeps an fp32 copy, and back: the same bits."""
    first, there, back = (tmp_path / each for each in ("first", "there", "back"))
    ranks[2].run(run, HOMES["fp32"], str(tmp_path), write=str(first), steps=STEPS)
    size = ZERO[name].get("tensor", 1)
    ranks[size].run(run, ZERO[name], str(tmp_path), read=str(first), write=str(there))
    ranks[2].run(run, HOMES["fp32"], str(tmp_path), read=str(there), write=str(back))
    assert values(back).keys() == values(first).keys()
    untrained = {key for key in differing(first, back) if (key[0], "exp_avg") not in values(first)}
    assert set(differing(first, back)) == untrained


@pytest.mark.long(ONE_HUB)
@pytest.mark.parametrize("group", ["fp32", "two engines"])
def test_a_training_through_all_of_them_is_that_of_one(
    group: str, ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    """A step under each strategy on each number of ranks, with another micro-batch: the losses agree to 1e-6."""
    legs = list(walk(GROUPS[group]))
    whole, *_ = ranks[2].run(run, HOMES[group], str(tmp_path), steps=len(legs))
    losses = []
    for number, (_, strategy, size, micro) in enumerate(legs):
        read = str(tmp_path / str(number - 1)) if number else None
        settings = {"read": read, "write": str(tmp_path / str(number)), "first": number, "micro": micro}
        (loss, *_), *_ = ranks[size].run(run, strategy, str(tmp_path), **settings, steps=1)
        losses.append(loss)
    assert losses == pytest.approx(whole, abs=1e-6)


def test_a_parameter_that_nothing_trains_is_kept(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """Under ZeRO 3 DeepSpeed's own checkpoints lose it: it requires a gradient, and no optimizer has it."""
    name = "whole.blocks.1.inner.bias"
    there, back = tmp_path / "there", tmp_path / "back"
    ranks[2].run(run, ZERO["zero3"], str(tmp_path), write=str(there), steps=STEPS, untrained=name)
    ranks[1].run(run, ZERO["zero1"], str(tmp_path), read=str(there), write=str(back), untrained=name)
    assert (name, "weight") in tensors(there)
    assert differing(there, back) == []
