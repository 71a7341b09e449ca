"""Counts and sizes as text: ``6B`` parameters, ``80GiB`` of memory; and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from determined_ds.errors import ConfigError, Problem

KIB, MIB, GIB, TIB = (1 << 10 * power for power in (1, 2, 3, 4))

# A count's thousands are decimal, whatever the letter's case: 6B is six thousand million.
COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
# Bytes as IEC 80000-13 has them: GiB is 2**30, GB is 10**9.
BYTE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{binary}{end}": (1024 if binary else 1000) ** power
    for power, letter in enumerate("kmgt", start=1)
    for binary in ("", "i")
    for end in ("", "b")
}
LARGEST = 10**21  # of either; beyond any machine
_NUMBER = re.compile(
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?P<power>e[+-]?[0-9]{1,3})?\s*(?P<unit>[a-z]*)"
)


def parse_count(text: str, *, key: str = "--parameters") -> int:
    """``"6B"`` -> 6 000 000 000; also ``345M``, ``1.5e9``, ``124_439_808``.

    Raises:
        ConfigError: the text, which was given for ``key``, is not such a number above 0.
    """
    return _parse(text, COUNT_UNITS, "K, M, B and T", key, "write e.g. 6B, 345M or 1.5e9")


def parse_bytes(text: str, *, key: str = "--gpu-memory") -> int:
    """``"80GiB"`` -> 85 899 345 920; ``80GB`` is 80 000 000 000, and a number alone, from 1024 on, is bytes.

    Raises:
        ConfigError: the text, which was given for ``key``, is not such a number above 0.
    """
    shown, fix = "B, KB, MB, GB, TB, KiB, MiB, GiB and TiB", "write e.g. 80GiB or 24GB"
    value = _parse(text, BYTE_UNITS, shown, key, fix)
    if value < KIB and text.strip().isdigit():
        message, fix = f"has no unit; {value} bytes are too few", f"write {value}GiB, e.g."
        raise ConfigError(Problem(key=key, value=text, message=message, fix=fix, code="quantity"))
    return value


def _parse(text: str, units: Mapping[str, int], shown: str, key: str, fix: str) -> int:
    found, message = (
        _NUMBER.fullmatch(text.strip().lower()),
        "must be a number above 0, with or without a unit",
    )
    if found is not None and found["unit"] not in units:
        message = f"the unit {found['unit'].upper()} must be one of {shown}"
    elif found is not None:
        number = (
            Fraction(found["number"].replace("_", "").replace(",", "").rstrip(".")) * units[found["unit"]]
        )
        value = round(number * Fraction(10) ** int((found["power"] or "e0")[1:]))
        if 1 <= value <= LARGEST:
            return value
        message = f"must be at least 1, and at most {LARGEST:.0e}"
    raise ConfigError(Problem(key=key, value=text, message=message, fix=fix, code="quantity"))


def format_bytes(number: int) -> str:
    """Bytes in the largest binary unit that they fill: ``"14.9 GiB"``, ``"640 MiB"``, ``"12 B"``."""
    return _format(number, (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)), "B", " ")


def format_count(number: int) -> str:
    """A count in the largest decimal unit that it fills: ``"6.74B"``, ``"124M"``, ``"512"``."""
    return _format(number, (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)), "", "")


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _format(number: int, units: tuple[tuple[str, int], ...], smallest: str, space: str) -> str:
    if number < 0:
        return "-" + _format(-number, units, smallest, space)
    for index, (unit, size) in enumerate(units):
        if number >= size:
            value = number / size
            shown = f"{round(value, max(0, 2 - math.floor(math.log10(value)))):g}"
            if index and float(shown) >= units[index - 1][1] / size:  # 999.9 was rounded up to the next unit
                return f"1{space}{units[index - 1][0]}"
            return f"{shown}{space}{unit}"
    return f"{number}{space}{smallest}".rstrip()
