"""Counts and sizes as text: ``6B`` parameters, ``80GiB`` of memory; and back."""

from __future__ import annotations

import math
import re

from determined_ds.errors import ConfigError, Problem

KIB, MIB, GIB, TIB = (1 << 10 * power for power in (1, 2, 3, 4))
_NUMBER = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[0-9]{1,2})?)\s*([a-z]*)")


def parse_count(text: str) -> int:
    """``"6B"`` -> 6 000 000 000; also ``345M``, ``1.5e9``, ``124_439_808``.

    Raises:
        ConfigError: the text, which was given for ``--parameters``, is not such a number above 0.
    """
    # Thousands are decimal, whatever the letter's case.
    units = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    return _parse(text, units, "--parameters", "write e.g. 6B, 345M or 1.5e9")


def parse_bytes(text: str) -> int:
    """``"80GiB"`` -> 85 899 345 920; ``80GB`` is 80 000 000 000, and a number alone is bytes.

    Raises:
        ConfigError: the text, which was given for ``--gpu-memory``, is not such a number above 0.
    """
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):  # as IEC 80000-13 has them
        units |= dict.fromkeys((letter, f"{letter}b"), 1000**power)
        units |= dict.fromkeys((f"{letter}i", f"{letter}ib"), 1024**power)
    fix = "write e.g. 80GiB or 24GB"
    value = _parse(text, units, "--gpu-memory", fix)
    if value < 1024**2:
        message = f"is {format_bytes(value)}, which no GPU has"
        raise ConfigError(Problem(key="--gpu-memory", value=text, message=message, fix=fix, code="quantity"))
    return value


def _parse(text: str, units: dict[str, int], key: str, fix: str) -> int:
    found = _NUMBER.fullmatch(text.strip().lower())
    unit = units.get(found[2], 0) if found else 0
    if found and (value := round(float(re.sub("[_,]", "", found[1])) * unit)):
        return value
    message = "must be a number above 0, with or without a unit"
    raise ConfigError(Problem(key=key, value=text, message=message, fix=fix, code="quantity"))


def format_bytes(number: int) -> str:
    """Bytes in the largest binary unit that they fill: ``"14.9 GiB"``, ``"640 MiB"``, ``"12 B"``."""
    return _format(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_count(number: int) -> str:
    """A count in the largest decimal unit that it fills: ``"6.74B"``, ``"124M"``, ``"512"``."""
    return _format(number, 1000, ("", "K", "M", "B", "T"))


def _format(number: int, thousand: int, units: tuple[str, ...]) -> str:
    """To three digits, in the first unit of which there are less than a thousand."""
    rest: float = number
    for unit in units:
        rounded = float(f"{rest:.3g}") if rest < 999.5 else round(rest)
        if rounded < thousand or unit == units[-1]:
            return f"{rounded:g}{unit}"
        rest /= thousand
    raise AssertionError(units)


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
