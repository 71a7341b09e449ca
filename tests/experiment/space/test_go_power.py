"""A power is Go's, to the last bit: a log hyperparameter is drawn as a master draws it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.experiment.space.go_power import go_power
from determined_ds.experiment.space.master_random import MasterRandom

# (base, exponent, math.Pow of Go 1.26 on x86-64)
OF_GO = [
    (10, -3, "0x1.0624dd2f1a9fcp-10"),
    (10, -3.5, "0x1.4b96be9c2da2cp-12"),
    (10, -2.7182818, "0x1.f57c362d503ep-10"),
    (10, -4.999, "0x1.50515d46e61f1p-17"),
    (10, -0.3, "0x1.009b9cf334252p-01"),
    (10, 0.25, "0x1.c73d51c54470fp+00"),
    (2, -5.3, "0x1.9fdf8bcce533fp-06"),
    (2, 3.7, "0x1.9fdf8bcce533fp+03"),
    (0.5, 2.6, "0x1.51cb453b9536cp-03"),
    (math.e, -7.1, "0x1.b097b54a20f2p-11"),
    (3.7, 12.9, "0x1.46141fb9f67edp+24"),
    (100, -1.6, "0x1.4acda94717d66p-11"),
    (10, -0.5, "0x1.43d136248490fp-02"),
    (2, 10, "0x1p+10"),
    (10, -300.2, "0x1.b0b0542a00de4p-998"),
    (1.0001, 4321.9, "0x1.8a6466faff6efp+00"),
]
# Learning rates of the first five trials of a search with experiment_seed 0 on a master of Determined 0.38.1, whose
# {type: log, base: 10, minval: -3.5, maxval: -2.0} is all that is drawn.
OBSERVED = [
    0.00210484565828905,
    0.005900347745614208,
    0.0068811258559188316,
    0.005227007137911156,
    0.0004041607057974523,
]


@pytest.mark.parametrize(("base", "exponent", "value"), OF_GO)
def test_it_is_what_go_computes(base: float, exponent: float, value: str) -> None:
    assert go_power(float(base), float(exponent)).hex() == float.fromhex(value).hex()


def test_it_is_what_a_master_drew() -> None:
    source = MasterRandom(0)
    drawn = []
    for _ in OBSERVED:
        drawn.append(go_power(10.0, source.uniform(-3.5, -2.0)))
        source.create()
    assert drawn == OBSERVED


@given(st.floats(1e-3, 1e3), st.floats(-60, 60))
def test_it_is_a_power_whatever_the_last_bits(base: float, exponent: float) -> None:
    assert go_power(base, exponent) == pytest.approx(base**exponent, rel=1e-12)


def test_the_simple_cases() -> None:
    assert (go_power(7.0, 0.0), go_power(1.0, 3.3), go_power(7.0, 1.0), go_power(9.0, 0.5)) == (1, 1, 7, 3)
    assert go_power(2.0, -2000.0) == 0.0
    with pytest.raises(OverflowError):
        go_power(10.0, 400.0)
