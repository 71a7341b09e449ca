"""Which side of a split a sample is on, when its data comes unsplit."""

from __future__ import annotations

import hashlib


def held_out(name: str, fraction: float, seed: int = 0) -> bool:
    """Whether what goes by this name is for validation: about ``fraction`` of all names are.

    The name and the seed alone decide, so a sample stays on its side when others are added, and is on the same side
    on every machine.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 < fraction
