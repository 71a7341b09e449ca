"""The options of ``det-ds run``, listed once: the command line is made of these fields. Loads no torch."""

# ruff: noqa: RUF009 -- _option calls dataclasses.field

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from determined_ds.config.params import AUTO
from determined_ds.rundir.handed_on import LAST

BASIC, RESUMING, EVALUATING, MACHINES = "Basic", "Resuming", "Evaluating", "Machines"


class _Slots(click.ParamType):
    """A number, or ``auto``."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return AUTO if value == AUTO else int(click.INT.convert(value, param, ctx))


def _option(group: str, help: str = "", *, default: Any = None, flag: str = "", **click_settings: Any) -> Any:
    metadata = {"group": group, "flag": flag, "help": help, "hidden": not group, **click_settings}
    return dataclasses.field(default=default, metadata=metadata)


PATH = click.Path(path_type=Path)
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What ``det-ds run`` was given."""

    config: Path
    context_dir: Path = Path()
    test: bool = _option(
        BASIC, "Train and validate one batch, save and verify one checkpoint.", default=False, is_flag=True
    )
    overrides: tuple[str, ...] = _option(
        BASIC, "As det's --config. Repeatable.", default=(), flag="--set", metavar="KEY=VALUE", multiple=True
    )
    run_dir: Path | None = _option(BASIC, "Default: runs/<name>/<time>.", type=PATH)
    resume: str | None = _option(
        RESUMING,
        "Resume in --run-dir from a checkpoint: its uuid, its path, best or last. Alone: the newest good one. "
        "One of another run is continued in a new --run-dir.",
        metavar="[UUID|PATH|best|last]",
        is_flag=False,
        flag_value=LAST,
    )
    evaluate: str | None = _option(
        EVALUATING,
        "Validate once with the weights of a checkpoint, and train nothing. A path; or a uuid, best or last in "
        "--run-dir.",
        metavar="CHECKPOINT",
    )
    slots: int | str | None = _option(
        MACHINES,
        "Ranks to start. Default: resources.slots_per_trial. auto: that many, or as many as this machine can run.",
        type=_Slots(),
    )
    accelerator: str | None = _option(
        MACHINES, "Default: CUDA if available.", type=click.Choice(["cpu", "cuda"])
    )
    report_to_master: bool = _option(
        MACHINES,
        "Show the run in the web UI of the master that DET_MASTER names, as an unmanaged experiment.",
        default=False,
        is_flag=True,
    )
    # For the commands that start runs: compare, search, autotune, profile.
    measure: int | None = _option("", metavar="STEPS", type=AT_LEAST_1)
    warmup: int = _option("", default=5, metavar="STEPS", type=AT_LEAST_0)
    profile: bool = _option("", default=False, is_flag=True)
    parts: int = _option("", default=0, metavar="STEPS", type=AT_LEAST_0)
    engine: str = _option("", default="deepspeed", type=click.Choice(["deepspeed", "ddp"]))
    parent: int | None = _option("", metavar="PID", type=int)

    @property
    def is_measured(self) -> bool:
        """Whether it trains some steps to measure them: from fresh weights, without a validation."""
        return self.measure is not None

    @property
    def train_arguments(self) -> list[str]:
        """The arguments of ``determined_ds.train`` that are the same at every launch."""
        words = ["--test"] if self.test else []
        words += [] if self.engine == "deepspeed" else ["--engine", self.engine]
        if self.measure is not None:
            words += ["--measure", str(self.measure), "--warmup", str(self.warmup)]
            words += ["--profile"] if self.profile else []
            words += ["--parts", str(self.parts)] if self.parts else []
        return words


def click_options() -> dict[str, list[click.Option]]:
    """The options of the command: group -> options, in their order; those of "" are hidden."""
    groups: dict[str, list[click.Option]] = {}
    for field in dataclasses.fields(RunOptions):
        settings = dict(field.metadata)
        if settings:
            group, flag = settings.pop("group"), settings.pop("flag")
            flags = [flag, field.name] if flag else [f"--{field.name.replace('_', '-')}"]
            groups.setdefault(group, []).append(click.Option(flags, default=field.default, **settings))
    return groups
