"""Powers to the last bit as Determined's master computes them: Go's ``math.Pow`` on x86-64.

A C library's power differs from Go's in the last bit for every second number, and a learning rate that differs in its
last bit makes a loss that does.

Source: Go 1.22 to 1.26, ``src/math/pow.go``, ``log_amd64.s`` and ``exp_amd64.s`` (the path for processors with FMA,
which is every x86-64 server since 2013). The series are those of FreeBSD's ``e_log.c`` and of SLEEF. On ARM Go's
exponential is another one, and the last bit may differ there.
"""

from __future__ import annotations

import math

LOG2_E = 1.4426950408889634
# ln 2 as the sum of two floats, for the logarithm and for the exponential.
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
LN2_UPPER, LN2_LOWER = (
    0.69314718055966295651160180568695068359375,
    0.28235290563031577122588448175013436025525412068e-12,
)
# Coefficients of s2, s4, ... in the logarithm; 1/8!, 1/7!, ..., 1/1! in the exponential.
LOG_SERIES = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
EXP_SERIES = tuple(1 / math.factorial(order) for order in range(8, 0, -1))
HALVINGS = 4  # the exponential is taken of a sixteenth, and squared so often
LARGEST_WHOLE = 2.0**63


def go_power(base: float, exponent: float) -> float:
    """``base ** exponent``.

    Args:
        base: Above 0, finite.
        exponent: Finite.

    Raises:
        OverflowError: it is too large for a float.
    """
    if exponent == 0 or base == 1:
        return 1.0
    if exponent == 1:
        return base
    if abs(exponent) == 0.5:
        return math.sqrt(base) if exponent > 0 else 1 / math.sqrt(base)
    part, whole = math.modf(abs(exponent))
    if whole >= LARGEST_WHOLE:
        return float(base**exponent)
    mantissa, power = 1.0, 0
    if part != 0:
        if part > 0.5:
            part, whole = part - 1, whole + 1
        mantissa = _exp(part * _log(base))
    square, shift = math.frexp(base)
    left = int(whole)
    while left:
        if abs(shift) > 2**12:
            power += shift
            break
        if left & 1:
            mantissa, power = mantissa * square, power + shift
        square, shift, left = square * square, shift * 2, left >> 1
        if square < 0.5:
            square, shift = square + square, shift - 1
    if exponent < 0:
        mantissa, power = 1 / mantissa, -power
    return math.ldexp(mantissa, power)


def _log(number: float) -> float:
    mantissa, power = math.frexp(number)
    if mantissa < math.sqrt(2) / 2:
        mantissa, power = mantissa * 2, power - 1
    f = mantissa - 1
    s = f / (2 + f)
    s2 = s * s
    s4 = s2 * s2
    l1, l2, l3, l4, l5, l6, l7 = LOG_SERIES
    odd = s2 * (l1 + s4 * (l3 + s4 * (l5 + s4 * l7)))
    even = s4 * (l2 + s4 * (l4 + s4 * l6))
    half = 0.5 * f * f
    return power * LN2_HIGH - ((half - (s * (half + (odd + even)) + power * LN2_LOW)) - f)


def _exp(number: float) -> float:
    """Of a number between -709 and 709."""
    power = round(LOG2_E * number)
    rest = _fused(-LN2_LOWER, power, _fused(-LN2_UPPER, power, number)) / 2**HALVINGS
    total = EXP_SERIES[0]
    for coefficient in EXP_SERIES[1:]:
        total = _fused(total, rest, coefficient)
    less_one = rest * total  # e**rest - 1, and so below: (1 + x)**2 - 1 = x * (x + 2)
    for _ in range(HALVINGS - 1):
        less_one = less_one * (less_one + 2)
    return math.ldexp(_fused(less_one, less_one + 2, 1.0), power)


def _fused(first: float, second: float, third: float) -> float:
    """``first * second + third``, rounded once; ``math.fma`` is there from Python 3.13 on."""
    (a, a_of), (b, b_of), (c, c_of) = (number.as_integer_ratio() for number in (first, float(second), third))
    return (a * b * c_of + c * a_of * b_of) / (a_of * b_of * c_of)
