"""``fit.profile``: which steps of a training are recorded by torch's profiler."""

from __future__ import annotations

from dataclasses import dataclass

from determined_ds.documents.document import Document, KeyPath, unknown_keys
from determined_ds.documents.values import KINDS, kind_of, type_fix
from determined_ds.errors import Problem

KEYS = ("wait", "warmup", "active")
MOST_ACTIVE = (
    50  # steps: a trace of GPT-2 takes megabytes a step on a disk, and a hundred times that in memory
)
EXAMPLE = "write e.g. {wait: 5, warmup: 2, active: 3}"


@dataclass(frozen=True, kw_only=True)
class ProfiledSteps:
    """Steps of this process, one after the other.

    Args:
        wait: Trained first, as without a profiler; >= 0.
        warmup: The profiler runs and records nothing: its first steps are slower; >= 0.
        active: Recorded; 1 to :data:`MOST_ACTIVE`.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 3

    @property
    def total(self) -> int:
        """Steps until all are recorded."""
        return self.wait + self.warmup + self.active


def read_profiled_steps(
    document: Document, path: KeyPath, *, num_batches: int | None = None
) -> tuple[ProfiledSteps | None, list[Problem]]:
    """Read ``fit.profile``.

    Args:
        document: The hyperparameters.
        path: Of the value, which is there.
        num_batches: How many are trained; None where that is not known, or not in batches.

    Returns:
        The steps, None where they are wrong; and what is.
    """
    given = document.get(path)
    if not isinstance(given, dict):
        message = f"must be a mapping, not {kind_of(given)}"
        return None, [document.problem(path, message, EXAMPLE, "wrong-type")]
    problems = list(unknown_keys(document, path, KEYS))
    values = {key: value for key, value in given.items() if key in KEYS and value is not None}
    for key, value in values.items():
        problems += _wrong(document, (*path, key), value)
    if problems:
        return None, problems
    steps = ProfiledSteps(**values)
    if num_batches is not None and steps.total > num_batches:
        message = f"needs {steps.total} batches (wait + warmup + active), and fit.max_length is {num_batches}"
        fix = "train more, or lower wait" if steps.wait else "train more, or lower active"
        return None, [document.problem(path, message, fix, "out-of-range")]
    return steps, []


def _wrong(document: Document, path: KeyPath, value: object) -> list[Problem]:
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"must be {KINDS[int]}, not {kind_of(value)}"
        return [document.problem(path, message, type_fix(int, value), "wrong-type")]
    least, most = (1, MOST_ACTIVE) if path[-1] == "active" else (0, 2**31 - 1)
    if least <= value <= most:
        return []
    if value < least:
        message, fix = f"must be {least} or more", f"write {least} or more"
    else:
        message = f"must be at most {most}: a trace grows by megabytes a step"
        fix = "write 3 to 10, which is enough for a mean"
    return [document.problem(path, message, fix, "out-of-range")]
