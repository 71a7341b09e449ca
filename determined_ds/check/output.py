"""Findings of a check, as a compiler prints them and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from determined_ds.errors import NOT_GIVEN, Origin, Problem, shown

if TYPE_CHECKING:
    from pathlib import Path

    from determined_ds.config.resolve import ResolvedConfig
    from determined_ds.experiment.experiment import Experiment

ERROR = "error"
WARNING = "warning"
NOTE = "note"  # what could not be judged, or is only good to know; counts as nothing
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a search space that has a problem."""

    count: int
    of: int  # points that were checked
    where: str  # e.g. ``with zero_stage = 2 or 3, e.g. zero_stage = 2``

    def __str__(self) -> str:
        return f"{self.count:,} of {self.of:,} {self.where}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem with its severity, and its part of the search space; None: all of it."""

    severity: str
    problem: Problem
    share: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found in one file.

    The findings are put in order: the checked file first, by place, errors before warnings.
    """

    file: str  # as the user named it
    kind: str  # ``experiment``, ``deepspeed``, ``context``, or ``code`` to be brought here
    findings: Sequence[Finding] = ()
    num_points: int = 0  # of the search space that were checked; 1 where nothing is searched
    num_runnable: int = 0
    size: int | None = None  # points in all; None where the space is not finite
    run: str = ""  # the command that runs the code, once it is changed
    context_dir: Path | None = None  # of an experiment's code
    experiment: Experiment | None = None  # None for another file, and where another library trains it
    # What runs: of a search the point in the middle, or else one that can run; None where code decides it.
    resolved: ResolvedConfig | None = None

    def __post_init__(self) -> None:
        def order(finding: Finding) -> tuple[bool, tuple[str, int, int], int]:
            where = place(finding, self.file)
            return where[0] != self.file, where, SEVERITIES.index(finding.severity)

        object.__setattr__(self, "findings", tuple(sorted(self.findings, key=order)))

    def points_in_words(self) -> str:
        """How many points of a search can run."""
        said = f"{self.num_runnable:,} of {self.num_points:,} points can run"
        return said if self.size == self.num_points else f"{said}, which are a sample"

    def as_json(self) -> dict[str, Any]:
        found = []
        for finding in self.findings:
            each = dict(zip(("file", "line", "column"), place(finding, self.file), strict=True))
            each |= {"severity": finding.severity, **vars(finding.problem)}
            if finding.problem.value is NOT_GIVEN:
                del each["value"]
            if finding.share:
                each["points"] = vars(finding.share)
            found.append(each)
        points = {"checked": self.num_points, "runnable": self.num_runnable, "size": self.size}
        run = {"run": self.run} if self.run else {}
        return {"file": self.file, "kind": self.kind, "findings": found, "points": points, **run}


def findings_of(
    errors: Iterable[Problem], warnings: Iterable[Problem] = (), notes: Iterable[Problem] = ()
) -> list[Finding]:
    """Problems of the whole file as findings."""
    by_severity = ((ERROR, errors), (WARNING, warnings), (NOTE, notes))
    return [Finding(severity=severity, problem=each) for severity, found in by_severity for each in found]


def place(finding: Finding, file: str) -> tuple[str, int, int]:
    """File, line and column of a finding; the start of the checked file where it has none."""
    origin = finding.problem.origin
    if isinstance(origin, Origin) and origin.file:
        return origin.file, max(origin.line, 1), max(origin.column, 1)
    return file, 1, 1


def text_lines(finding: Finding, file: str) -> tuple[str, str, str, list[str]]:
    """A finding as a compiler prints it: place, severity, message, and the lines below."""
    where, line, column = place(finding, file)
    problem = finding.problem
    head = problem.key if problem.value is NOT_GIVEN else f"{problem.key} = {shown(problem.value)}"
    elsewhere = problem.origin and not (isinstance(problem.origin, Origin) and problem.origin.line)
    if elsewhere and problem.origin != file:  # a flag, the accelerator
        head = f"{head} ({problem.origin})" if head else str(problem.origin)
    message = f"{head}: {problem.message}" if head else problem.message
    below = [f"points: {finding.share}"] if finding.share else []
    below += [f"fix: {problem.fix}"] if problem.fix else []
    return f"{where}:{line}:{column}", finding.severity, f"{message} [{problem.code}]", below
