"""A profile as ``profile.json``, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from determined_ds.documents.files import write_whole
from determined_ds.profile.step_parts import VERSION, Profile, RankProfile


def as_json(profile: Profile) -> dict[str, Any]:
    """All fields of a profile by their names, and the means that it derives; seconds and bytes, as names say.

    The moments at which ranks come to collectives are left out: there may be thousands.

    Args:
        profile: What was found.
    """
    ranks = [{**asdict(rank), **_means(rank)} for rank in profile.ranks]
    for rank in ranks:
        del rank["arrivals"]
    return {"version": VERSION, **_means(profile), **asdict(profile), "ranks": ranks}


def _means(one: Profile | RankProfile) -> dict[str, Any]:
    found = {"step_s": one.step_s, "seconds": one.seconds, "overlapped_s": one.overlapped_s}
    if isinstance(one, Profile):
        return {**found, "tflops_per_rank": one.tflops_per_rank, "mfu": one.mfu}
    return {**found, "clock_s": one.clock_s, "median_s": one.median_s}


def write_profile(profile: Profile, path: Path) -> None:
    """Write it, whole or not at all."""
    write_whole(path, json.dumps(as_json(profile), indent=1) + "\n")
