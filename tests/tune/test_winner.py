"""The experiment that a tuning ends with: what was measured, whole, and on top what each of its choices gained."""

from __future__ import annotations

import re
import statistics
from dataclasses import fields
from pathlib import Path

import pytest

from determined_ds.documents.reading import parse_yaml
from determined_ds.tune.choice import Choice, read_base
from determined_ds.tune.selection import Measured
from determined_ds.tune.winner import IN_WORDS, gains, winner_yaml
from tests.tune.bases import CPU, ROOT, gpt2_candidates, named
from tests.tune.simulated import Machine, Told, tuned

GAIN = re.compile(r"#   (.+): (.+) -> (.+), (\d+\.\d\d) times as fast \((measured|by the fitted model)\)")
OWN = "as it is (zero1 micro 16)"


def told(seed: int = 0) -> Told:
    return tuned(gpt2_candidates(), Machine(gpt2_candidates(), seed), trials=16)


def told_of(fast: str, *others: str, overrides: tuple[str, ...] = ()) -> Told:
    """A tuning between the experiment as it is and few others, of which one is fast."""
    everything = gpt2_candidates(*overrides)
    candidates = [everything[0], *(named(everything, name) for name in (fast, *others) if name != OWN)]
    machine = Machine(candidates, 0)
    machine.seconds[everything[0].name if fast == OWN else fast] = 0.5 * min(machine.seconds.values())
    found = tuned(candidates, machine, trials=16)
    assert found.best == (everything[0].name if fast == OWN else fast)
    return found


def best_of(found: Told) -> Measured:
    best = found.tuning.best
    assert best is not None
    return best


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]


# ---------------------------------------------------------------------------------------- what was measured


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_experiment_that_was_measured(seed: int) -> None:
    """To the letter: read again it is the same document, and runs with the same JSON."""
    found = told(seed)
    before = list(found.machine.measured)
    best = best_of(found)
    text = winner_yaml(found.tuning, best)
    variant = best.candidate.variant
    assert variant.document is not None
    assert variant.resolved is not None
    document = parse_yaml(text, "best.yaml")
    assert document.data == variant.document.data
    assert read_base(document, ROOT, CPU).resolved.ds_config == variant.resolved.ds_config
    assert found.machine.measured == before


def test_it_can_be_tuned_again() -> None:
    """Its choices are what it is now, so that another tuning begins with them."""
    found = told_of("pipeline of 2 micro 4 bf16")
    best = best_of(found)
    own = read_base(parse_yaml(winner_yaml(found.tuning, best), "best.yaml"), ROOT, CPU).own
    assert (own.pipe_parallel_size, own.micro_batch_size, own.zero_stage) == (2, 4, 0)


# -------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize("seed", range(5))
def test_every_choice_says_what_it_gained(seed: int) -> None:
    found = told(seed)
    best = best_of(found)
    first, second, *rest = comments(winner_yaml(found.tuning, best))
    name = best.candidate.name
    assert f"# {name}: the best of {len(found.tuning.found)} strategies that were measured for" in first
    assert re.search(r"samples/s, \d+\.\d\d times the .* of the experiment as it was; 2 slots", second)
    own, chosen = gpt2_candidates()[0].variant.choice, best.candidate.variant.choice
    changed = {each.name for each in fields(Choice) if getattr(own, each.name) != getattr(chosen, each.name)}
    [predictions] = [line for line in rest if "predictions of" in line]
    assert re.fullmatch(
        r"#   predictions of \d+ step times: median error [\d.]+ %, rank correlation -?\d.\d\d", predictions
    )
    rest.remove(predictions)
    matches = [GAIN.fullmatch(line) for line in rest if "nothing that was tried" not in line]
    assert all(matches)
    assert {match[1] for match in matches if match} == {IN_WORDS[each] for each in changed}
    ratios = [float(match[4]) for match in matches if match]
    assert ratios == sorted(ratios, reverse=True)


def test_a_gain_is_the_ratio_of_what_was_measured() -> None:
    """One choice away from the experiment as it was, it is the ratio of the two."""
    found = told_of("zero1 micro 16 bf16")
    best = best_of(found)
    [gain] = gains(found.tuning, best)
    slow, fast = (
        statistics.median(s for row in each.rows for run in row.repetitions for s in run.step_seconds)
        for each in (found.tuning.found[OWN], best)
    )
    assert (gain.before, gain.after, gain.measured) == (None, "bf16", True)
    assert gain.ratio == pytest.approx(slow / fast)
    assert str(gain) == f"precision: as it was -> bf16, {slow / fast:.2f} times as fast (measured)"


def test_what_was_not_measured_is_of_the_fitted_model() -> None:
    """Two choices away, what lies between them may not have been measured."""
    found = told_of("zero3 micro 4 bf16", "zero3 micro 4")
    is_measured = {gain.what: gain.measured for gain in gains(found.tuning, best_of(found))}
    assert is_measured == {
        "precision": True,
        "zero_optimization.stage": False,
        "train_micro_batch_size_per_gpu": False,
    }


def test_a_choice_that_cannot_be_taken_back_says_nothing() -> None:
    """A pipeline of 34 samples can have micro-batches of 2, and two replicas of it cannot."""
    found = told_of("pipeline of 2 micro 2", overrides=("hyperparameters.global_batch_size=34",))
    texts = {gain.what for gain in gains(found.tuning, best_of(found))}
    assert texts == {"train_micro_batch_size_per_gpu", "zero_optimization.stage"}


def test_where_nothing_is_faster_it_says_so() -> None:
    found = told_of(OWN, "zero0 micro 1")
    text = winner_yaml(found.tuning, best_of(found))
    assert comments(text)[-1] == "#   It is the experiment as it was: nothing that was tried is faster."
    assert "1.00 times the" in comments(text)[1]


def test_it_names_the_experiment_that_it_was_made_of() -> None:
    text = winner_yaml(told().tuning, best_of(told()))
    assert str(Path("experiments/gpt2/const.yaml")) in comments(text)[0]
