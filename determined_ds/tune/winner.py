"""The experiment that tuning ends with, as a YAML that says what each of its choices gained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from determined_ds.experiment.secrets import stored_yaml
from determined_ds.report.results import Row
from determined_ds.tune.candidates import Candidate
from determined_ds.tune.choice import Choice
from determined_ds.tune.selection import Measured, Tuning
from determined_ds.tune.variants import decided

IN_WORDS = {
    "zero_stage": "zero_optimization.stage",
    "pipe_parallel_size": "pipe_parallel_size",
    "pipe_schedule": "pipe_schedule",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "offload_optimizer": "offload_optimizer",
    "offload_param": "offload_param",
    "precision": "precision",
    "activation_checkpointing": "activation checkpointing",
    "torch_compile": "torch_compile",
}


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one choice of the winner gained.

    Args:
        what: The choice.
        before: As the experiment has it.
        after: As the winner has it.
        ratio: Step time with the winner's choices but for this one, over the winner's; above 1 it is a gain.
        measured: Whether both were measured; else it is the cost model's, which was fitted to what was.
    """

    what: str
    before: object
    after: object
    ratio: float
    measured: bool

    def __str__(self) -> str:
        how = "measured" if self.measured else "by the fitted model"
        return f"{self.what}: {_shown(self.before)} -> {_shown(self.after)}, {self.ratio:.2f} times as fast ({how})"


def gains(tuning: Tuning, best: Measured) -> list[Gain]:
    """What each choice of the winner gained, the most first."""
    found = list(_gains(tuning, best.candidate, tuning.candidates[0].variant.choice))
    return sorted(found, key=lambda gain: -gain.ratio)


def _gains(tuning: Tuning, best: Candidate, own: Choice) -> Iterator[Gain]:
    winner = best.variant.choice
    for field in fields(Choice):
        before, after = getattr(own, field.name), getattr(winner, field.name)
        if before == after or field.name not in IN_WORDS:
            continue
        without = _without(tuning, best, replace(winner, **{field.name: before}))
        if without is None:
            continue
        times = [_seconds(tuning, each) for each in (without, best)]
        seconds, is_measured = zip(*times, strict=True)
        yield Gain(
            what=IN_WORDS[field.name],
            before=before,
            after=after,
            ratio=seconds[0] / seconds[1],
            measured=all(is_measured),
        )


def _without(tuning: Tuning, best: Candidate, choice: Choice) -> Candidate | None:
    """The winner less one choice: of the candidates, or made for this."""
    known = (each for each in tuning.candidates if each.variant.choice == choice)
    found = next(known, None)
    if found is None:
        variant = decided(best.base, "", choice)
        if not variant.can_run:
            return None
        found = Candidate(base=best.base, variant=variant, shape=best.shape)
    return found


def _seconds(tuning: Tuning, candidate: Candidate) -> tuple[float, bool]:
    """A step's time, and whether it was measured."""
    measured = tuning.found.get(candidate.name)
    known = measured.row.median_step_seconds if measured else None
    if known is not None:
        return known, True
    [prediction] = tuning.model.predict([candidate.variant], [candidate.shape])
    return math.exp(prediction.log_seconds), False


def winner_yaml(tuning: Tuning, best: Measured) -> str:
    """The winning experiment, whole, with what it gained on top."""
    first = tuning.found[tuning.candidates[0].name].row
    assert best.candidate.variant.document is not None
    lines = [
        f"# {best.candidate.name}: the best of {len(tuning.found)} strategies that were measured for"
        f" {best.candidate.base.document.name}.",
        f"# {_beside(best.row, first)}",
    ]
    lines += [f"#   {gain}" for gain in gains(tuning, best)]
    if best.candidate is tuning.candidates[0]:
        lines.append("#   It is the experiment as it was: nothing that was tried is faster.")
    return "\n".join(lines) + "\n" + stored_yaml(best.candidate.variant.document.data)


def _beside(row: Row, first: Row) -> str:
    text = f"{row.samples_per_second or 0:,.1f} samples/s"
    if first.samples_per_second and row.samples_per_second:
        ratio = row.samples_per_second / first.samples_per_second
        text += f", {ratio:.2f} times the {first.samples_per_second:,.1f} of the experiment as it was"
    return f"{text}; {row.slots} slots, {row.num_steps} steps measured."


def _shown(value: object) -> str:
    if value is None:
        return "as it was"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
