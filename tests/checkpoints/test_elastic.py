"""A checkpoint's engines are read by any number of ranks under any strategy, bit for bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.checkpoints.strategies import BATCH, PAIRS, ZERO, Strategy, run
from tests.harness.ranks import Ranks, RanksOf
from tests.package import tensors

STEPS = 3
AtHome = Callable[[str], tuple[Path, list[float]]]
GROUPS: dict[str, Mapping[str, Strategy]] = {
    "fp32": {name: strategy for name, strategy in ZERO.items() if "bf16" not in strategy},
    "bf16": {name: strategy for name, strategy in ZERO.items() if "bf16" in strategy},
    "two engines": PAIRS,
}
HOMES = {"fp32": ZERO["zero1"], "bf16": ZERO["bf16_zero1"], "two engines": PAIRS["1 and 3"]}
# Every kind of cut, on fewer ranks than its checkpoint came from, as many, and more.
PLACES = [("zero3", 1), ("zero3", 4), ("bf16_zero2", 2), ("pipe2_zero1", 4), ("dualpipev", 2)]
PLACES += [("tensor2_zero1", 4)]


@pytest.fixture(scope="module")
def at_home(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> AtHome:
    """``at_home(group)``: what two ranks wrote after three steps, and the losses of these and of two more."""

    @functools.cache
    def trained(group: str) -> tuple[Path, list[float]]:
        path = tmp_path_factory.mktemp("home") / "first"
        losses, *_ = two_ranks.run(run, HOMES[group], path.parent, write=path, steps=STEPS, then=2)
        return path, losses

    return trained


def values(path: Path, engine: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """As :func:`tensors`, of each weight only its most exact value: some strategies write no other."""
    found = tensors(path, engine)
    exact = {name: value for (name, state), value in found.items() if state == "fp32"}
    rest = {key: value for key, value in found.items() if key[1] != "fp32"}
    return {**rest, **{(name, "weight"): value for name, value in exact.items()}}


def differing(path: Path, other: Path, engine: int = 0) -> list[tuple[str, str]]:
    """What is in one checkpoint alone, or has another value in the other."""
    one, two = values(path, engine), values(other, engine)
    same = {key for key in one.keys() & two.keys() if torch.equal(one[key].float(), two[key].float())}
    return [key for key in {**one, **two} if key not in same]


@pytest.mark.parametrize(("name", "size"), PLACES)
def test_there_and_back(name: str, size: int, at_home: AtHome, ranks_of: RanksOf, tmp_path: Path) -> None:
    """What ZeRO 1 on two ranks wrote, read and written by another strategy, is read back bit for bit."""
    group, there, back = "bf16" if "bf16" in ZERO[name] else "fp32", tmp_path / "there", tmp_path / "back"
    home, losses = at_home(group)
    away, *_ = ranks_of(size).run(run, ZERO[name], tmp_path, read=home, write=there, first=STEPS, then=2)
    assert away == pytest.approx(losses[STEPS:], abs=2e-2 if group == "bf16" else 1e-6)
    assert differing(home, there) == []
    ranks_of(2).run(run, HOMES[group], tmp_path, read=there, write=back)
    assert tensors(back).keys() == tensors(home).keys()
    assert differing(home, back) == []


def walk(strategies: Mapping[str, Strategy]) -> Iterator[tuple[str, Strategy, int, int]]:
    """Every strategy on every number of ranks, in a random order: name, strategy, ranks, micro-batch."""
    draw, places = random.Random(18), []
    for name, strategy in strategies.items():
        shared = strategy.get("pipe_parallel_size", 1) * strategy.get("model_parallel_size", 1)
        least = strategy["zero"].get("zero_hpz_partition_size", shared)
        places += [(name, strategy, size, BATCH // (size // shared)) for size in (1, 2, 4) if size >= least]
    for name, strategy, size, own in draw.sample(places, len(places)):
        yield name, strategy, size, draw.choice([each for each in (1, 2, 4, 8) if own % each == 0])


@pytest.mark.long("test_there_and_back has every kind of cut, each from the same strategy")
@pytest.mark.parametrize("group", GROUPS)
def test_through_all_of_them_in_any_order(
    group: str, at_home: AtHome, ranks_of: RanksOf, tmp_path: Path
) -> None:
    """Each reads what the one before wrote; all hold the same bits, and home again training continues as if at home."""
    first, whole = at_home(group)
    at = first
    for number, (name, strategy, size, micro) in enumerate(walk(GROUPS[group])):
        there = tmp_path / str(number)
        ranks_of(size).run(run, strategy, tmp_path, read=at, write=there, micro_batch_size=micro)
        for engine in range(2 if group == "two engines" else 1):
            assert differing(first, there, engine) == [], f"{name} on {size}, number {number} of the walk"
        at = there
    losses, *_ = ranks_of(2).run(run, HOMES[group], tmp_path, read=at, first=STEPS, steps=2)
    assert losses == whole[STEPS:]


def test_a_parameter_that_nothing_trains_is_kept(ranks_of: RanksOf, tmp_path: Path) -> None:
    """Under ZeRO 3 DeepSpeed's own checkpoints lose it: it requires a gradient, and no optimizer has it."""
    name = "whole.blocks.1.inner.bias"
    there, back = tmp_path / "there", tmp_path / "back"
    ranks_of(2).run(run, ZERO["zero3"], tmp_path, write=there, steps=STEPS, untrained=name)
    ranks_of(1).run(run, ZERO["zero1"], tmp_path, read=there, write=back, untrained=name)
    assert (name, "weight") in tensors(there)
    assert differing(there, back) == []
