"""The bubble of each schedule is that of its authors, exactly: counted in whole numbers, however long passes take.

What ranks wait is stated beside the time of all passes, as in the papers; as a share of both together it is the bubble.
"""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tests.package import bubble
from tests.pipe.steps import (
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_H1,
    Step,
    simulated,
    step_time,
    steps,
)

times = st.integers(1, 50)


def waited(step: Step, **seconds: int) -> Fraction:
    """Seconds that each rank waits of a step; all wait alike."""
    spans = simulated(step.orders, step.parts, lambda op: seconds[op[0]])
    [waits] = {step_time(spans) - sum(end - start for _, start, end in own) for own in spans}
    return Fraction(waits)


@given(steps(GPIPE, ONE_F_ONE_B, INTERLEAVED), times, times)
def test_of_1f1b_gpipe_and_interleaved(step: Step, forward: int, backward: int) -> None:
    """(p-1)/m of the ideal time, 1/V of that with V chunks: arXiv 1811.06965, 2104.04473 section 2.2."""
    ideal = step.chunks * step.micro_batches * (forward + backward)
    found = waited(step, F=forward, B=backward)
    assert found / ideal == Fraction(step.ranks - 1, step.chunks * step.micro_batches)


@given(steps(ZB_H1), times, times, times)
def test_of_zb_h1(step: Step, forward: int, inputs: int, weights: int) -> None:
    """(p-1)(T_F + T_B - T_W), as section 2.3 of arXiv 2401.10241 has it, with T_W the shortest of them and m >= p.

    Longer weight passes do more than fill the gaps. With fewer micro-batches than ranks there are too few of them.
    """
    p, m = step.ranks, step.micro_batches
    found, papers = waited(step, F=forward, I=inputs, W=weights), (p - 1) * (forward + inputs - weights)
    if m >= p:
        assert found == max(papers, (p - 1) * forward, (p - 1) * inputs)
    elif weights <= min(forward, inputs):
        assert found == papers + (p - m) * weights


@given(steps(DUALPIPEV), times, times)
def test_of_dualpipev_as_deepspeed_has_it(step: Step, forward: int, backward: int) -> None:
    """Its authors state (p-1)(F&B + B - 3W), for passes that overlap and weight gradients that come late.

    DeepSpeed's has neither, and waits for the longest of three ways through the V: of backward passes where they take
    longer, of forward passes where those do, of both by turns in between.
    """
    p, f, b = step.ranks, forward, backward
    ways = (2 * (p - 1) * b - f, (p - 1) * (f + b), 2 * (p - 1) * f)
    assert waited(step, F=f, B=b) == (max(ways) if p > 1 else 0)


@given(steps())
def test_the_counted_bubble_is_the_formula_to_the_last_bit(step: Step) -> None:
    """A backward pass takes twice as long as a forward pass, and both its parts alike."""
    p, m, v = step.ranks, step.micro_batches, step.chunks
    formula = {
        GPIPE: Fraction(p - 1, m + p - 1),
        ONE_F_ONE_B: Fraction(p - 1, m + p - 1),
        INTERLEAVED: Fraction(p - 1, v * m + p - 1),
        ZB_H1: Fraction(p - 1 + max(0, p - m), 3 * m + p - 1 + max(0, p - m)),
        DUALPIPEV: Fraction(4 * p - 5, 6 * m + 4 * p - 5) if p > 1 else Fraction(0),
    }
    counted = bubble(*step.numbers)
    assert abs(counted - formula[step.schedule]) < Fraction(1, 2**52)  # a float's last bit
