"""``machine.json``: what was measured of this machine by ``det-ds bench``, whose peak a profile is held against.

Written by ``bench``, read by ``profile``. Each machine has a file of its own in the user's data
folder, found by its hardware, so that machines which share a home do not take one another's figures. Loads no torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.documents.files import write_files
from determined_ds.errors import ConfigError
from determined_ds.protocol.machine_figures import (
    KNOWN_KEYS,
    Bandwidth,
    BenchRun,
    Collective,
    Hardware,
    HeldStates,
    Peak,
    TimedCheckpoint,
    TimedStep,
)
from determined_ds.protocol.strict_json import from_json, json_text

FORMAT = 1  # raised when keys or their meaning change
KIND = "measurements of a machine by determined_ds"
NAME = "machine.json"
LOCATION = "DETERMINED_DS_MACHINE"  # environment variable: another path of the file


@dataclass(frozen=True, kw_only=True)
class MachineFigures:
    """All that was measured of a machine.

    Args:
        hardware: Of which.
        measured: The newest measurement of each kind.
        collectives: By ``communication``.
        peaks: By ``training``.
        bandwidths: By ``memory``.
        states: By ``memory``.
        steps: By ``training``.
        checkpoints: By ``checkpoint``.
    """

    __pydantic_config__ = KNOWN_KEYS

    hardware: Hardware
    measured: tuple[BenchRun, ...] = ()
    collectives: tuple[Collective, ...] = ()
    peaks: tuple[Peak, ...] = ()
    bandwidths: tuple[Bandwidth, ...] = ()
    states: tuple[HeldStates, ...] = ()
    steps: tuple[TimedStep, ...] = ()
    checkpoints: tuple[TimedCheckpoint, ...] = ()

    def peak_flops_per_s(self, precision: str, ranks: int) -> float | None:
        """Of one of so many ranks on a machine, by the nearest number that was measured; None where none was."""
        alike = [each for each in self.peaks if each.precision == precision]
        nearest = min(alike, key=lambda each: abs(math.log(each.ranks / max(1, ranks))), default=None)
        return None if nearest is None else nearest.flops_per_s

    def merged(self, newer: MachineFigures) -> MachineFigures:
        """These figures, with newer ones in the place of those that they repeat."""
        lists = [field.name for field in dataclasses.fields(self) if field.name != "hardware"]
        both: dict[str, Any] = {name: _replaced(getattr(self, name), getattr(newer, name)) for name in lists}
        return dataclasses.replace(newer, **both)


# ---------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is known of a machine.

    Args:
        path: BenchPlace its file is, or would be.
        machine: None where nothing was measured of it.
        note: Why a file that is there is not used; "" otherwise.
    """

    path: Path
    machine: MachineFigures | None = None
    note: str = ""


def machine_path(hardware: Hardware, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the figures of a machine are: ``DETERMINED_DS_MACHINE``, or by its hardware in the user's data folder."""
    if stated := environment.get(LOCATION):
        return Path(stated)
    import appdirs

    words = f"{hardware.accelerator} {hardware.identity}"
    folder = "-".join("".join(char if char.isalnum() else " " for char in words).split())
    return Path(appdirs.user_data_dir("determined_ds"), folder, NAME)


def figures_of(hardware: Hardware, path: Path | None = None) -> Figures:
    """What was measured of a machine. A file that is damaged, or of another machine, is ignored, with a note.

    Args:
        hardware: The machine.
        path: The file; :func:`machine_path`, if None.
    """
    path = machine_path(hardware) if path is None else path
    if not path.exists():
        return Figures(path=path)
    try:
        machine = read_machine(path)
    except ConfigError as error:
        return Figures(path=path, note=f"ignored: {error.problems[0].message} ({path})")
    if machine.hardware.identity != hardware.identity:
        return Figures(path=path, note=f"ignored: {path} is of {machine.hardware}; this is {hardware}")
    return Figures(path=path, machine=machine)


def read_machine(path: Path) -> MachineFigures:
    """Read a machine's figures.

    Raises:
        ConfigError: there is no such file, it is damaged, or is another program's.
    """
    return from_json(MachineFigures, path, kind=KIND, version=FORMAT, file=NAME)


def write_machine(path: Path, machine: MachineFigures) -> None:
    """Write a machine's figures. Folders that are missing are made.

    Raises:
        ConfigError: it cannot be written.
    """
    write_files({path: machine_text(machine)}, overwrite=True)


def machine_text(machine: MachineFigures) -> str:
    """The text of ``machine.json``."""
    return json_text(machine, kind=KIND, version=FORMAT)


def _replaced(old: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
    """Figures by their keys, the new ones in the place of the old."""
    by_key = {each.key: each for each in (*old, *new)}
    return tuple(by_key.values())
