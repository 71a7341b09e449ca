"""What ``det-ds estimate`` says of seconds, by the figures that ``det-ds bench`` has measured of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determined_ds.config.strategy import Strategy
    from determined_ds.memory import ModelShape
    from determined_ds.tune.rates import Rates

HEADS = ("step", "compute", "communic.", "optimizer", "checkpoint")
KEYS = ("step_s", "compute_s", "communication_s", "optimizer_s", "checkpoint_s")


@dataclass(frozen=True, kw_only=True)
class ExpectedTimes:
    """Seconds of strategies.

    Args:
        source: What was measured of which machine; why nothing is expected, where nothing is.
        seconds: Of each strategy, :data:`KEYS` -> seconds, None where a figure was not measured; empty where nothing
            is expected.
        notes: About them.
    """

    source: str
    seconds: Sequence[dict[str, float | None]] = ()
    notes: tuple[str, ...] = ()

    def lines(self, names: Sequence[str], width: int) -> list[str]:
        """A table for people, and where its numbers are from.

        Args:
            names: Of the strategies.
            width: Of the terminal.
        """
        from determined_ds.report.fitted import FittedColumn, FittedRow, fitted, plain, wrapped

        if not self.seconds:
            return wrapped(f"times: {self.source}", width)
        columns = [FittedColumn(head=("seconds",), no_room="above")]
        columns += [FittedColumn(head=(head,), align="right") for head in HEADS]
        rows = [
            FittedRow(cells=[(name,), *((_shown(seconds[key]),) for key in KEYS)])
            for name, seconds in zip(names, self.seconds, strict=True)
        ]
        notes = [f"times: {self.source}", *self.notes]
        return [plain(line) for line in fitted(columns, rows, width, notes=notes)]


def expected_times(shape: ModelShape, strategies: Sequence[Strategy]) -> ExpectedTimes:
    """The seconds of strategies on this machine, as far as it was measured; torch is not loaded.

    Args:
        shape: Of the model.
        strategies: With as many ranks each.
    """
    from determined_ds.devices import detect_without_torch, hardware_here
    from determined_ds.tune.rates import rates_here

    accelerator = detect_without_torch()
    if accelerator is None:
        return ExpectedTimes(source="unknown: only torch can say what this machine computes on")
    rates, source = rates_here(accelerator)
    if rates.machine is None:
        return ExpectedTimes(source=source)
    slots, here = strategies[0].slots, accelerator.num_devices
    if accelerator.name == "cpu" and slots > here:
        return ExpectedTimes(source=f"not for {slots} ranks: this machine has {here} CPU cores")
    if rates.machines(slots) > 1 and not rates.knows_between(slots):
        return ExpectedTimes(source=f"not for {slots} ranks: communication between machines was not measured")
    notes = [
        f"on {hardware_here(accelerator)}, in {strategies[0].precision}; communication: were none hidden"
    ]
    if not rates.knows_training:
        notes.append("compute: not measured; det-ds bench training measures it")
    elif not shape.sequence_length:
        notes.append("compute: not known of a model without a length of its samples")
    elif not rates.knows_precision(strategies[0].precision):
        notes.append(f"compute: by other figures, for training in {strategies[0].precision} was not timed")
    seconds = [_seconds(shape, strategy, rates) for strategy in strategies]
    return ExpectedTimes(source=source, seconds=seconds, notes=tuple(notes))


def _seconds(shape: ModelShape, strategy: Strategy, rates: Rates) -> dict[str, float | None]:
    from determined_ds.tune.step_times import checkpoint_seconds, is_predictable, step_times

    times = step_times(strategy, shape, rates)
    compute = times.compute_s if is_predictable(shape, rates) else None
    communication = times.communication_s if rates.knows_between(strategy.slots) else None
    return {
        "step_s": None if compute is None or communication is None else times.total_s,
        "compute_s": compute,
        "communication_s": communication,
        "optimizer_s": times.optimizer_s if rates.knows_memory else None,
        "checkpoint_s": checkpoint_seconds(strategy, shape, rates),
    }


def _shown(seconds: float | None) -> str:
    from determined_ds.report.formatting import number

    return "–" if seconds is None else number(seconds, 3)


def as_json(expected: ExpectedTimes) -> dict[str, Any]:
    """For programs."""
    return {"source": expected.source, "notes": list(expected.notes), "strategies": list(expected.seconds)}
