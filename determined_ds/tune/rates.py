"""What a rank does in a second: as ``det-ds bench`` measured it on this machine, else by its order of magnitude."""

from __future__ import annotations

import math
from dataclasses import dataclass

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.strategy import Strategy
from determined_ds.devices import hardware_here
from determined_ds.protocol.machine_figures import (
    ALL_REDUCE,
    DEVICE,
    HOST,
    TO_DEVICE,
    TimedStep,
    bus_factor,
)
from determined_ds.protocol.machine_file import MachineFigures, figures_of

HINT = "det-ds bench measures this machine, for predictions of step times"
# Orders of magnitude of a rank: FLOP/s, bytes/s between ranks, bytes/s of its memory, seconds to start a micro-batch.
# Of them only the ratios matter; the first measurement sets the scale.
ASSUMED = {"cpu": (5e10, 2e9, 1e10, 4e-3), "cuda": (1e14, 1e11, 1e12, 3e-3)}
PCIE = 2e10  # bytes/s between a GPU and its host
OF_PEAK = 0.5  # of large matrix products' FLOP/s, that training is assumed to reach where it was not timed
RUN_DIRECTORY = "run directory"


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one rank.

    Args:
        accelerator: ``cpu`` or ``cuda``.
        machine: What was measured of the machine; None: everything is assumed.
    """

    accelerator: str
    machine: MachineFigures | None = None

    @property
    def source(self) -> str:
        """What it is from and of which days, in words; "" where nothing was measured."""
        if self.machine is None:
            return ""
        days = sorted({each.when.partition("T")[0] for each in self.machine.measured})
        return (
            f"det-ds bench of {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else "det-ds bench"
        )

    @property
    def knows_training(self) -> bool:
        """Whether operations per second were measured, without which a step's time is unknown."""
        return self.machine is not None and bool(self.machine.peaks or self._timed(None))

    def knows_precision(self, precision: str) -> bool:
        """Whether steps of this precision were timed."""
        return bool(self._timed(precision))

    def flops_per_s(self, strategy: Strategy, num_parameters: int) -> float:
        """Operations per second of a rank while it trains, by the timed steps that are nearest in size.

        Where training in the precision was not timed: by those in any other, else a share of the measured peak.

        Args:
            strategy: Its precision, ranks and micro-batch.
            num_parameters: Of the model.
        """
        precision, ranks = strategy.precision, strategy.slots

        def distance(step: TimedStep) -> tuple[float, float]:
            sizes = (
                (step.num_parameters or num_parameters) / num_parameters,
                step.micro_batch_size / strategy.micro_batch_size,
            )
            return abs(math.log(step.ranks / ranks)), sum(abs(math.log(ratio)) for ratio in sizes)

        timed = self._timed(precision) or self._timed(None)
        if timed:
            _, rate = min(timed, key=lambda found: distance(found[0]))
            return rate
        peak = self.machine.peak_flops_per_s(precision, ranks) if self.machine else None
        return ASSUMED[self.accelerator][0] if peak is None else OF_PEAK * peak

    def _timed(self, precision: str | None) -> list[tuple[TimedStep, float]]:
        """Steps that were timed, with the FLOP/s of a rank; of any precision, if None."""
        steps = self.machine.steps if self.machine else ()
        return [
            (step, rate)
            for step in steps
            if (precision is None or step.precision == precision) and (rate := step.flops_per_s) is not None
        ]

    @property
    def knows_collectives(self) -> bool:
        """Whether all-reduce was measured within a machine."""
        return self.machine is not None and self.machine.collective(ALL_REDUCE, 2) is not None

    def knows_between(self, ranks: int) -> bool:
        """Whether all-reduce was measured over the machines that so many ranks need; one rank needs none."""
        if ranks < 2:
            return True
        return (
            self.machine is not None
            and self.machine.collective(ALL_REDUCE, ranks, self.machines(ranks)) is not None
        )

    @property
    def knows_memory(self) -> bool:
        """Whether the bandwidth of the memory that a rank computes in was measured."""
        return self._bandwidth(DEVICE, 1) is not None

    def collective_s(self, name: str, size_bytes: float, ranks: int, *, calls: int = 1) -> float:
        """Seconds that collectives over so many bytes in all take, none of it hidden.

        Args:
            name: One of :data:`determined_ds.protocol.machine_figures.COLLECTIVES`.
            size_bytes: Of all calls.
            ranks: That take part.
            calls: Into which the bytes are divided, >= 1.
        """
        known = self.machine.collective(name, ranks, self.machines(ranks)) if self.machine else None
        if known is None:
            return size_bytes * bus_factor(name, ranks) / ASSUMED[self.accelerator][1]
        return calls * known.seconds(size_bytes / calls, ranks=ranks)

    def machines(self, ranks: int) -> int:
        """Machines like this one that so many ranks need."""
        if self.machine is None or self.accelerator == "cpu":
            return 1
        return -(-ranks // self.machine.hardware.num_devices)

    def memory_bytes_per_s(self, ranks: int) -> float:
        """Of the memory that a rank computes in."""
        return self._bandwidth(DEVICE, ranks) or ASSUMED[self.accelerator][2]

    def host_bytes_per_s(self, ranks: int) -> float:
        """Of the host's memory."""
        place = DEVICE if self.accelerator == "cpu" else HOST
        return self._bandwidth(place, ranks) or ASSUMED["cpu"][2]

    def to_device_bytes_per_s(self, ranks: int) -> float:
        """Between a device and its host."""
        return self._bandwidth(TO_DEVICE, ranks) or PCIE

    def _bandwidth(self, place: str, ranks: int) -> float | None:
        return self.machine.bytes_per_s(place, ranks) if self.machine else None

    @property
    def start_s(self) -> float:
        """To start a micro-batch."""
        return ASSUMED[self.accelerator][3]

    def checkpoint_s(self, size_bytes: float, zero_stage: int, ranks: int) -> float | None:
        """Seconds that training waits for a checkpoint of so many bytes in the run directory; None if not measured."""
        there = [
            each
            for each in (self.machine.checkpoints if self.machine else ())
            if each.storage == RUN_DIRECTORY
        ]
        alike = [each for each in there if each.strategy == f"zero{zero_stage}"] or there
        if not alike:
            return None
        nearest = min(alike, key=lambda each: abs(math.log(each.ranks / ranks)))
        return size_bytes / nearest.write_bytes_per_s


def rates_here(accelerator: Accelerator) -> tuple[Rates, str]:
    """The rates of this machine, and in words where they are from: its file may be absent, or ignored."""
    figures = figures_of(hardware_here(accelerator))
    rates = Rates(accelerator=accelerator.name, machine=figures.machine)
    said = f"of this machine, by {rates.source}" if rates.machine else f"none of this machine: {HINT}"
    return rates, figures.note or said
