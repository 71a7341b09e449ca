"""What a profile has found, as lines for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from determined_ds.memory.units import format_bytes
from determined_ds.report.formatting import percent
from determined_ds.report.profile_pictures import OWNERS, fullest_rank, shown_rank
from determined_ds.report.texts import printable, squeezed

WIDTH = 80
LONGEST = 54  # of an operator's name, or a module's


def profile_lines(profile: Mapping[str, Any]) -> list[str]:
    """Findings, operators and memory, an empty line after each.

    Args:
        profile: Of ``profile.json``.
    """
    found = (findings_lines(profile), operators_lines(profile), memory_lines(profile))
    return [line for lines in found if lines for line in (*lines, "")][:-1]


def findings_lines(profile: Mapping[str, Any]) -> list[str]:
    """The findings, the one that could save most first.

    Args:
        profile: Of ``profile.json``.
    """
    if not profile.get("findings"):
        return ["Nothing was found that costs more than 3 % of a step."]
    lines = ["What could be faster, by the time of a step that it could save at most:"]
    for number, finding in enumerate(profile["findings"], 1):
        saves = f"{milliseconds(finding['saves_s'])}, {percent(finding['share'])} of a step"
        lines += ["", f"  {number}. {finding['code']}: {saves}"]
        lines += _wrapped(printable(finding["seen"]), "     ", "     ")
        lines += _wrapped(printable(finding["fix"]), "     try: ", "          ")
    return lines


def operators_lines(profile: Mapping[str, Any]) -> list[str]:
    """The operators that cost most, two lines each; empty where they are not known.

    Args:
        profile: Of ``profile.json``.
    """
    rank = shown_rank(profile)
    if rank is None:
        return []
    lines = [f"The operators that cost most on rank {rank['rank']}, without what they call:", ""]
    lines += ["  share        time  calls  operator, module, shapes"]
    for each in rank["operators"]["costliest"]:
        name = squeezed(f"{printable(each['name'])}, {each['phase']}", LONGEST - 5)
        share, time = percent(each["share"]), milliseconds(each["seconds"])
        lines += [f"{share:>7}  {time:>10}  {each['calls']:>5,.0f}  {name}"]
        lines += _wrapped(_about(each), " " * 28, " " * 28) if _about(each) else []
    return [line[:WIDTH] for line in lines]


def _about(operator: Mapping[str, Any]) -> str:
    module = squeezed(printable(operator["module"]), LONGEST)
    several = f" ({operator['num_modules']} modules)" if operator["num_modules"] > 1 else ""
    return f"{module}{several} {operator['shapes']}".strip()


def memory_lines(profile: Mapping[str, Any]) -> list[str]:
    """The peak of a step's memory, when it is and what holds it; empty where it is not known.

    Args:
        profile: Of ``profile.json``.
    """
    rank = fullest_rank(profile)
    if rank is None:
        return []
    memory = rank["memory"]
    held: Mapping[str, int] = memory["peak_bytes_by_owner"]
    peak = sum(held.values())
    where = (
        f"the {memory['peak_phase']} pass" if memory["peak_phase"] in ("forward", "backward") else "a step"
    )
    module = f" of {squeezed(printable(memory['peak_module']), LONGEST)}" if memory["peak_module"] else ""
    lines = _wrapped(
        f"Memory of tensors on rank {rank['rank']}: at most {format_bytes(peak)}, "
        f"{milliseconds(memory['peak_at_s'])} after the step began, in {where}{module}. Then it is held by",
        "",
        "",
    )
    for owner, num_bytes in sorted(held.items(), key=lambda item: -item[1]):
        if num_bytes >= 0.005 * peak:
            share, size = percent(num_bytes / peak), format_bytes(num_bytes)
            lines += [f"{share:>7}  {size:>10}  {OWNERS.get(owner, owner)}"]
            lines += list(_modules(memory["peak_modules"], owner))
    return lines


def _modules(modules: Mapping[str, int], owner: str) -> Iterator[str]:
    for name, num_bytes in modules.items():
        of, _, module = name.partition(" ")
        if of == owner:
            shown = squeezed(printable(module), LONGEST - 8) or "outside of modules"
            yield f"{format_bytes(num_bytes):>23}    {shown}"[:WIDTH]


def milliseconds(seconds: float) -> str:
    """A time of a step: ``3.2 ms``, ``412 ms``, ``2.41 s``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _wrapped(text: str, first: str, further: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=further) or [first]
