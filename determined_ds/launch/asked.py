"""What ``det-ds run`` was given, to be handed on. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What ``det-ds run`` was given.

    Args:
        config: The experiment's YAML.
        context_dir: The folder with the code.
        slots: ``--slots``.
        overrides: ``--set``.
        run_dir: ``--run-dir``.
        resume: ``--resume``.
        accelerator: ``--accelerator``.
        storage: ``--storage``.
        test: ``--test``.
        hang_timeout: ``--hang-timeout``, in minutes.
        measured: Whether it is measured for some steps.
        more: More arguments of ``determined_ds.train``.
    """

    config: Path
    context_dir: Path
    slots: int | str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    resume: bool = False
    accelerator: str | None = None
    storage: bool = False
    test: bool = False
    hang_timeout: float | None = None
    measured: bool = False
    more: Sequence[str] = ()

    def words(self) -> list[str]:
        """The same as arguments of ``det-ds``, without ``--slots``: whoever is handed them has its slots."""
        words = ["run", str(self.config), str(self.context_dir)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--test"] if self.test else []
        words += ["--run-dir", str(self.run_dir)] if self.run_dir else []
        words += ["--resume"] if self.resume else []
        words += ["--storage"] if self.storage else []
        words += [] if self.hang_timeout is None else ["--hang-timeout", f"{self.hang_timeout:g}"]
        return words + (["--accelerator", self.accelerator] if self.accelerator else [])
