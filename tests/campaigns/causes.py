"""Causes of lost time, planted in trainings of GPT-2 that are profiled: each is to be named first, by turns."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.case import Case
from tests.profile.planted import CLEAN, PLANTED, mistakes, profile_of
from tests.ranks import Ranks


def planted_causes(count: int, draw: random.Random, folder: Path) -> Iterator[Case]:
    """As many trainings as asked for, of which every fifth has nothing planted; nothing is drawn."""
    causes = [*PLANTED, CLEAN]
    for number in range(count):
        cause, here = causes[number % len(causes)], folder / str(number)
        profile = profile_of(Ranks(2, here / "logs"), here / "run", cause)
        first = next((f"{each.code} {100 * each.share:.0f} %" for each in profile.findings), "nothing")
        name = f"{cause}: {first} of {1000 * profile.step_s:.0f} ms"
        yield Case(name=name, failures=mistakes(profile, cause))
        shutil.rmtree(here)
