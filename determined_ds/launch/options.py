"""The options of ``det-ds run``, listed once: the command line is made of these fields. Loads no torch."""

# ruff: noqa: RUF009 -- _option calls dataclasses.field

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from determined_ds.config.params import AUTO
from determined_ds.rundir.handed_on import HANG_TIMEOUT, HANG_TIMEOUT_MINUTES, LAST


class Slots(click.ParamType):
    """A number, or ``auto``."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return AUTO if value == AUTO else int(click.INT.convert(value, param, ctx))


def _option(help: str = "", *, default: Any = None, flag: str = "", **click_settings: Any) -> Any:
    return dataclasses.field(default=default, metadata={"flag": flag, "help": help, **click_settings})


PATH = click.Path(path_type=Path)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What ``det-ds run`` was given."""

    config: Path
    context_dir: Path = Path()
    slots: int | str | None = _option(
        "Ranks to start. Default: resources.slots_per_trial. auto: that many, or as many as this machine can run.",
        type=Slots(),
    )
    test: bool = _option(
        "Train and validate one batch, save one checkpoint and verify it; then stop.",
        default=False,
        is_flag=True,
    )
    overrides: tuple[str, ...] = _option(
        "As det's --config. Repeatable.", default=(), flag="--set", metavar="KEY=VALUE", multiple=True
    )
    run_dir: Path | None = _option("Default: runs/<name>/<time>.", type=PATH)
    resume: str | None = _option(
        "Resume in --run-dir from a checkpoint: its uuid, its path, best or last. Alone: the newest good one. "
        "One of another run is continued in a new --run-dir.",
        metavar="[UUID|PATH|best|last]",
        is_flag=False,
        flag_value=LAST,
    )
    reset_optimizer: bool = _option(
        "Of --resume: take the weights and the batch count, and begin the optimizer's state anew; needed where its "
        "kind has changed.",
        default=False,
        is_flag=True,
    )
    evaluate: str | None = _option(
        "Validate once with the weights of a checkpoint, and train nothing. A path; or a uuid, best or last in "
        "--run-dir.",
        metavar="CHECKPOINT",
    )
    predict: Path | None = _option(
        "Write the trial's predictions, a row a sample, to a .jsonl, .csv, .parquet or .pt file; train nothing.",
        metavar="FILE",
        type=PATH,
    )
    checkpoint: str | None = _option(
        "Of --predict: as for --evaluate. Default: the best in --run-dir.", metavar="CHECKPOINT"
    )
    accelerator: str | None = _option("Default: CUDA if available.", type=click.Choice(["cpu", "cuda"]))
    hang_timeout: float | None = _option(
        "End a run in which no step completes for this long; 0: no limit. Default: "
        f"{HANG_TIMEOUT} of the experiment or the shell, or {HANG_TIMEOUT_MINUTES:g}.",
        metavar="MINUTES",
        type=click.FloatRange(min=0),
    )
    report_to_master: bool = _option(
        "Show the run in the web UI of the master that DET_MASTER names, as an unmanaged experiment.",
        default=False,
        is_flag=True,
    )
    # For the commands that start runs: compare, search, autotune, profile.
    measure: int | None = _option(metavar="STEPS", type=click.IntRange(min=1), hidden=True)
    warmup: int = _option(default=5, metavar="STEPS", type=click.IntRange(min=0), hidden=True)
    profile: bool = _option(default=False, is_flag=True, hidden=True)
    parts: int = _option(default=0, metavar="STEPS", type=click.IntRange(min=0), hidden=True)
    engine: str = _option(default="deepspeed", type=click.Choice(["deepspeed", "ddp"]), hidden=True)
    parent: int | None = _option(metavar="PID", type=int, hidden=True)

    @property
    def stated_slots(self) -> int | None:
        """The number of ``--slots``; None where it is ``auto`` or absent."""
        return None if isinstance(self.slots, str) else self.slots

    @property
    def is_measured(self) -> bool:
        """Whether it trains some steps to measure them: from fresh weights, without a validation."""
        return self.measure is not None

    @property
    def only_reads(self) -> bool:
        """Whether it uses the weights of a checkpoint, and trains nothing."""
        return self.evaluate is not None or self.predict is not None

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


def flag_of(field: dataclasses.Field[Any]) -> str:
    """An option as it is typed: ``--run-dir``."""
    return field.metadata["flag"] or f"--{field.name.replace('_', '-')}"


def click_options() -> list[click.Option]:
    """The options of the command, in their order."""
    options = []
    for field in dataclasses.fields(RunOptions):
        settings = {key: value for key, value in field.metadata.items() if key != "flag"}
        if settings:
            flags = [flag_of(field), field.name] if field.metadata["flag"] else [flag_of(field)]
            options.append(click.Option(flags, default=field.default, **settings))
    return options
