"""Arithmetic of spans of time: sorted, disjoint, each with a length above 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Span = tuple[float, float]  # begin, end
Spans = Sequence[Span]


def union(spans: Iterable[Span]) -> list[Span]:
    """What at least one of them covers; they may overlap, in any order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def intersection(left: Spans, right: Spans) -> list[Span]:
    """What both cover."""
    return list(_common(left, right))


def _common(left: Spans, right: Spans) -> Iterator[Span]:
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            yield begin, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1


def difference(left: Spans, right: Spans) -> list[Span]:
    """What ``left`` covers and ``right`` does not."""
    found: list[Span] = []
    j = 0
    for begin, end in left:
        while j < len(right) and right[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > at:
                found.append((at, right[k][0]))
            at = max(at, right[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found


def length(spans: Spans) -> float:
    """Of all of them."""
    return sum(end - begin for begin, end in spans)


def shared_out(whole: Span, claims: Iterable[tuple[str, Spans]], rest: str) -> dict[str, list[Span]]:
    """Share a span out: each claim takes what is left of it by those before.

    Args:
        whole: What is shared out.
        claims: Name -> spans, the strongest first; a name may come again.
        rest: Name of what is left.

    Returns:
        Name -> spans, which are disjoint and cover ``whole``.
    """
    left, found = union([whole]), dict[str, list[Span]]()
    for name, spans in claims:
        taken = intersection(left, spans)
        found[name] = union([*found.get(name, ()), *taken])
        left = difference(left, taken)
    found[rest] = union([*found.get(rest, ()), *left])
    return found
