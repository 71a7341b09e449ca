"""Everything this package raises on purpose.

The tree::

    DeterminedDSError
    ├── ConfigError          a configuration that cannot run: exit 2, no traceback
    │   ├── EntrypointError  the entrypoint names no trial that can be run
    │   ├── DataError        the data that the configuration names cannot be trained on
    │   └── TrialError       the trial's own code does what cannot be trained, found before training
    └── TrainingError        training itself failed: exit 1
        ├── CheckpointError  a checkpoint could not be written or read back
        ├── NotFiniteError   a loss is not finite: nothing is saved of it
        ├── SpikeError       a loss has spiked: the next start goes back to a checkpoint before it
        └── ChiefFailed      rank 0 failed, and says why; raised on the others, with its exit code

A :class:`ConfigError` carries *all* the problems that were found, each as a :class:`Problem` with the
key, its value, where the value came from, what is wrong and how to fix it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EXIT_TRAINING_FAILED = 1
EXIT_CONFIG = 2
EXIT_CRASHED = 3  # of a rank that had trained, and did not expect its end: another start may come further

MAX_SHOWN = 120


class _NotGiven(enum.Enum):
    """The value of a key that is missing; None is a value. An enum, so that copies and pickles stay it."""

    NOT_GIVEN = enum.auto()


NOT_GIVEN: Any = _NotGiven.NOT_GIVEN


class Origin(str):
    """Where a value came from, as messages say it; one that came out of a file also knows the place.

    Args:
        text: E.g. ``const.yaml:14``, ``--set``, ``learning_rate, const.yaml:14``.
        file: The file as the user named it; "" where there is none.
        line: Counted from 1; 0 where only the file is known.
        column: Counted from 1; 0 where only the file is known.
    """

    file: str
    line: int
    column: int

    def __new__(cls, text: str = "", *, file: str = "", line: int = 0, column: int = 0) -> Origin:
        origin = super().__new__(cls, text)
        origin.file, origin.line, origin.column = file, line, column
        return origin

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (str(self),), {"file": self.file, "line": self.line, "column": self.column}

    def reworded(self, text: str) -> Origin:
        """The same place in other words."""
        return Origin(text, file=self.file, line=self.line, column=self.column)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration.

    Args:
        key: Dotted name of the key at fault, e.g. ``hyperparameters.global_batch_size``; "" for a whole file.
        message: What is wrong, in one sentence without the key's name repeated.
        value: The offending value; left out for a key that is missing.
        origin: Where the value came from, e.g. ``const.yaml:14`` or ``--set``; an :class:`Origin` where there is
            a file.
        fix: What to write instead. Every problem should have one.
        code: Short stable name of the rule that found it, e.g. ``pipeline-zero-stage``.
    """

    key: str
    message: str
    value: Any = NOT_GIVEN
    origin: str = ""
    fix: str = ""
    code: str = "invalid"

    def __str__(self) -> str:
        head = self.key
        if self.value is not NOT_GIVEN:
            head += f" = {shown(self.value)}"
        if self.origin:
            head += f" ({self.origin})" if head else str(self.origin)
        lines = [f"{head}: {self.message}" if head else self.message]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as messages put it: short, whatever it is; true, false and null as a file says them."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


class DeterminedDSError(Exception):
    """Root of the errors of this package."""

    exit_code = EXIT_TRAINING_FAILED


class ConfigError(DeterminedDSError):
    """A configuration that cannot run. Names every problem at once.

    Args:
        problems: One or more :class:`Problem`.
        warnings: What was found beside them that does not keep it from running; shown with them.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, problems: Problem | Iterable[Problem] | str, warnings: Iterable[Problem] = ()) -> None:
        if isinstance(problems, str):  # so torch raises again what was raised in a worker of a data loader
            problems = Problem(key="", message=problems.rpartition(f"{type(self).__name__}: ")[2].strip())
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.warnings: tuple[Problem, ...] = tuple(warnings)
        assert self.problems, "a ConfigError without a problem"
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def lines_of_error(error: DeterminedDSError) -> list[str]:
    """An error as a command prints it: every warning and every problem."""
    warnings = error.warnings if isinstance(error, ConfigError) else ()
    problems = error.problems if isinstance(error, ConfigError) else (error,)
    return [
        *(f"warning: {warning}" for warning in warnings),
        *(f"error: {problem}" for problem in problems),
    ]


class EntrypointError(ConfigError):
    """The entrypoint names no trial that can be run."""


class DataError(ConfigError):
    """The data that the configuration names cannot be trained on."""


class TrialError(ConfigError):
    """The trial's own code returns or does what cannot be trained; found before training. No other point would do."""


class TrainingError(DeterminedDSError):
    """Training started and failed."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written, or read back as it was."""


class NotFiniteError(TrainingError):
    """A loss or a metric is not a finite number: nothing is saved of the weights behind it."""


class SpikeError(TrainingError):
    """A loss has spiked, and that is recorded: the next start goes back, and leaves its batches out."""

    exit_code = EXIT_CRASHED


class ChiefFailed(TrainingError):
    """Rank 0 failed in a step that it takes for all ranks, and says why itself."""
