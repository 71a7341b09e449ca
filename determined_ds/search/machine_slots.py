"""The slots of this machine, and how the trials of a search share them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from determined_ds.config.layout import Accelerator
from determined_ds.devices import GPU_NODES, detect_accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.search.methods import brackets_of, with_defaults

NO_LIMIT = 2**31


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the trials of a search share.

    Args:
        accelerator: What they compute on.
        slots: Its devices that they may take.
        slots_per_trial: Of each of them.
        wanted: Trials that the search ever has at once, 1 or more.
        gpus: Names of these devices in ``CUDA_VISIBLE_DEVICES``; none on CPUs.
    """

    accelerator: Accelerator
    slots: int
    slots_per_trial: int
    wanted: int
    gpus: tuple[str, ...] = ()

    @property
    def fits(self) -> int:
        """Trials that it has slots for; one that is larger than the machine runs alone."""
        return max(1, self.slots // self.slots_per_trial)

    @property
    def at_once(self) -> int:
        """Trials that run side by side, 1 or more."""
        return min(self.fits, self.wanted)

    @property
    def threads(self) -> int | None:
        """Threads of each rank where several trials share the cores; None to leave it to ``det-ds run``."""
        if self.accelerator.name == "cuda" or self.at_once == 1 or os.environ.get("OMP_NUM_THREADS"):
            return None
        return max(1, self.accelerator.num_devices // (self.at_once * self.slots_per_trial))


def machine_accelerator(name: str | None) -> Accelerator:
    """As :func:`detect_accelerator`, which a process of its own is asked where that loads torch.

    Raises:
        ConfigError: the accelerator does not exist here.
    """
    if name == "cpu" or not any(Path(node).exists() for node in GPU_NODES):
        return detect_accelerator(name)
    code = (
        "import dataclasses, json, sys; from determined_ds.devices import detect_accelerator;"
        "print(json.dumps(dataclasses.asdict(detect_accelerator(sys.argv[1] or None))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name or ""], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return detect_accelerator(name)  # to say what is wrong
    return Accelerator(**json.loads(done.stdout.splitlines()[-1]))


def machine_of(experiment: Experiment, devices: Accelerator, machine_slots: int | None) -> Machine:
    """The slots that trials share.

    Raises:
        ConfigError: there are not as many GPUs, or more ranks than the CPUs carry.
    """
    slots = devices.num_devices if machine_slots is None else machine_slots
    if slots < 1:
        fix = "give the number of devices that the trials may take, or leave it out for all of them"
        raise ConfigError(Problem(key="--machine-slots", value=slots, message="must be 1 or more", fix=fix))
    if devices.name == "cuda" and slots > devices.num_devices:
        message = f"there {'is' if devices.num_devices == 1 else 'are'} {devices.num_devices} on this machine"
        fix = f"give at most {devices.num_devices}"
        raise ConfigError(Problem(key="--machine-slots", value=slots, message=message, fix=fix))
    if devices.name == "cuda" and experiment.slots > slots:
        message = f"a trial takes more GPUs than the {slots} that the trials of this machine share"
        raise ConfigError(_slots_problem(experiment, message, f"use --slots {slots}, or --accelerator cpu"))
    if experiment.slots > devices.max_ranks:  # else each point would be found to be impossible
        message = f"this machine carries {devices.max_ranks} ranks ({devices.num_devices} CPU cores)"
        raise ConfigError(_slots_problem(experiment, message, f"use --slots {devices.max_ranks} or fewer"))
    wanted = wanted_at_once(experiment)
    if devices.name != "cuda":
        return Machine(accelerator=devices, slots=slots, slots_per_trial=experiment.slots, wanted=wanted)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else list(map(str, range(slots)))
    return Machine(
        accelerator=devices,
        slots=slots,
        slots_per_trial=experiment.slots,
        wanted=wanted,
        gpus=tuple(names[:slots]),
    )


def wanted_at_once(experiment: Experiment) -> int:
    """How many trials a search has at once at most, if there are slots for them."""
    searcher = with_defaults(experiment.config.get("searcher") or {})
    if searcher["name"] == "single":
        return 1
    stated = int(searcher["max_concurrent_trials"])
    if searcher["name"] == "adaptive_asha":
        stated = sum(bracket["max_concurrent_trials"] for bracket in brackets_of(searcher))
    max_slots = experiment.document.get(("resources", "max_slots"))
    in_slots = max(1, max_slots // experiment.slots) if isinstance(max_slots, int) else NO_LIMIT
    return min(stated or NO_LIMIT, in_slots)


def _slots_problem(experiment: Experiment, message: str, fix: str) -> Problem:
    path, document = ("resources", "slots_per_trial"), experiment.document
    return Problem(
        key=document.key(path),
        value=experiment.slots,
        origin=document.origin(path),
        message=message,
        fix=fix,
        code="slots",
    )


def slots_in_words(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def machine_warnings(experiment: Experiment, machine: Machine) -> Iterator[str]:
    """What of the searcher is probably not meant so on this machine."""
    are = "is" if machine.slots == 1 else "are"
    where = f"there {are} {machine.slots} on this machine ({machine.accelerator.name})"
    if machine.slots_per_trial > machine.slots:
        yield (
            f"resources.slots_per_trial: a trial takes {slots_in_words(machine.slots_per_trial)},"
            f" and {where}: one trial runs at a time, and its ranks share them"
        )
    path = ("searcher", "max_concurrent_trials")
    stated = experiment.document.get(path)
    if isinstance(stated, int) and stated > machine.fits and experiment.space.searcher != "single":
        origin = experiment.document.origin(path)
        at_once = "1 trial runs" if machine.fits == 1 else f"{machine.fits} trials run"
        yield (
            f"searcher.max_concurrent_trials = {stated} ({origin}): a trial takes"
            f" {slots_in_words(machine.slots_per_trial)}, and {where}: {at_once} at a time, the others wait"
        )
