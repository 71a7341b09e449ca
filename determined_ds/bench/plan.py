"""What will be measured, on what: decided and checked before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from determined_ds.config.layout import Accelerator
from determined_ds.devices import detect_accelerator, detect_without_torch
from determined_ds.errors import ConfigError, Problem
from determined_ds.launch.external.placement import Placement, placement_here
from determined_ds.protocol.handed_on import count
from determined_ds.protocol.machine_figures import COMMUNICATION
from determined_ds.protocol.run_dir import RUNS, new_run_dir
from determined_ds.protocol.run_lock import check_run_dir

CPU_SLOTS = 2
LARGEST_BYTES = {"cpu": 2**26, "cuda": 2**30}
# Of transformers, LAYERSxWIDTH: on GPUs those of GPT-2.
MODELS = {"cpu": ("4x128", "6x256", "8x512"), "cuda": ("12x768", "24x1024", "36x1280")}
HELD_MODELS = {"cpu": ("4x256", "6x512"), "cuda": MODELS["cuda"]}  # of which every strategy is tried
MICRO_BATCHES = {"cpu": (1, 4, 16), "cuda": (1, 4, 16, 64)}
STRATEGIES = ("zero0", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")


@dataclass(frozen=True, kw_only=True)
class BenchPlace:
    """On what is measured.

    Args:
        accelerator: The devices of this machine.
        slots: Ranks in all.
        run_dir: BenchPlace everything is written.
        placed: This process's place, where another launcher has started the ranks.
    """

    accelerator: Accelerator
    slots: int
    run_dir: Path
    placed: Placement | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this process shows and writes what is measured."""
        return self.placed is None or self.placed.rank == 0

    def __str__(self) -> str:
        machines = 1 if self.placed is None else self.placed.machines
        return f"{count(self.slots, 'rank')} on {count(machines, 'machine')}, {self.accelerator.name}"


def decide_where(
    bench: str, *, slots: int | None, accelerator: str | None, run_dir: Path | None, alone: str = ""
) -> BenchPlace:
    """Decide on what to measure.

    Args:
        bench: The kind.
        slots: Ranks; if None, a rank for each GPU, and two on a CPU.
        accelerator: ``cpu``, ``cuda`` or None for the best there is.
        run_dir: BenchPlace to write; ``runs/bench_<kind>/<time>``, if None.
        alone: Why it cannot be one of another launcher's ranks; "" where it can.

    Raises:
        ConfigError: there is no such device, fewer than that many slots, or no permission to write; every reason.
    """
    placed = placement_here()
    devices = detect_without_torch(accelerator) or detect_accelerator(accelerator)
    if placed is not None:
        stated, slots = slots, placed.size
        problems = _other_launcher(placed, stated, alone)
    else:
        slots = slots or (devices.num_devices if devices.name == "cuda" else CPU_SLOTS)
        problems = _too_many(slots, devices)
    if bench == COMMUNICATION and slots < 2:
        fix = "use --slots 2 or more" if devices.max_ranks > 1 else "use --accelerator cpu --slots 2"
        problems.append(_slots(slots, "a single rank has no peer to communicate with", fix))
    run_dir = run_dir or new_run_dir(RUNS / f"bench_{bench}", datetime.now())
    try:
        check_run_dir(run_dir)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return BenchPlace(accelerator=devices, slots=slots, run_dir=run_dir.resolve(), placed=placed)


def _too_many(slots: int, devices: Accelerator) -> list[Problem]:
    if slots <= devices.max_ranks:
        return []
    what = "GPU" if devices.name == "cuda" else "CPU core"
    message = f"this machine has {count(devices.num_devices, what)}, for {devices.max_ranks} at most"
    return [_slots(slots, message, f"use --slots {devices.max_ranks}")]


def _other_launcher(placed: Placement, stated: int | None, alone: str) -> list[Problem]:
    problems = []
    if stated not in (None, placed.size):
        message = f"{placed.launcher} has started {count(placed.size, 'rank')}"
        problems.append(_slots(stated, message, "leave --slots out"))
    if alone:
        message, fix = f"{alone}, and {placed.launcher} has started this one", "start det-ds bench by itself"
        problems.append(Problem(key="the environment", message=message, fix=fix, code="launcher"))
    return problems


def _slots(value: int | None, message: str, fix: str) -> Problem:
    return Problem(key="--slots", value=value, message=message, fix=fix, code="slots")


def check_precision(precision: str | None, devices: Accelerator) -> str:
    """The precision to compute in; what training would choose here, if None.

    Raises:
        ConfigError: the device does not compute in it.
    """
    if precision == "fp16" and not devices.fp16:
        message, fix = "this device does not train in fp16", "use bf16 or fp32"
        raise ConfigError(
            Problem(key="--precision", value=precision, message=message, fix=fix, code="precision")
        )
    return precision or ("bf16" if devices.bf16 else "fp32")


def check_words(option: str, words: Sequence[str], known: Sequence[str]) -> None:
    """Check the names that an option lists.

    Raises:
        ConfigError: none is given, or one that is not known; all of them.
    """
    fix = f"use any of {','.join(known)}"
    unknown = [word for word in words if word not in known]
    problems = [
        Problem(key=option, value=word, message="unknown name", fix=fix, code="name") for word in unknown
    ]
    if not words:
        problems = [Problem(key=option, message="is empty", fix=fix, code="name")]
    if problems:
        raise ConfigError(problems)
