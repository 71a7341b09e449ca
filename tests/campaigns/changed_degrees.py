"""``python -m tests.campaigns.changed_degrees FOLDER``: the published protocol of universal checkpoints, for GPT-2.

Train, resume from the middle with other degrees of parallelism, and compare the losses of each step with those of
the run that was not interrupted. Each base trains uninterrupted and leaves a checkpoint in the middle; each change
resumes from it in a run directory of its own. What is complete in FOLDER is not run again.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from PIL import Image

from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.report.style import MUTED, PALETTE, SMALL_PT, drawing, figure_of, png_of
from tests.command import DET_DS, ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIDDLE, END = 100, 200
FIT = "hyperparameters.fit."
SETTINGS = (
    f"{FIT}reporting_period.batches=1",
    f"{FIT}validation_period.batches={MIDDLE}",
    f"{FIT}checkpoint_period.batches={MIDDLE}",
    f"{FIT}checkpoint_policy=none",
    f"{FIT}max_length.batches={END}",
    "hyperparameters.sequence_length=64",
)
FIRST, CLOSE = 10, 1e-6  # in the first steps after a change a loss in fp32 is as close as this
EXACT = 3e-9  # where a deviation of 0 is drawn


@dataclass(frozen=True, kw_only=True)
class Base:
    """An uninterrupted run.

    Args:
        name: Of its run directory.
        says: Its strategy, for people.
        config: Its experiment.
        slots: Ranks.
        sets: What is set in it.
    """

    name: str
    says: str
    config: str
    slots: int
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Change:
    """A resume from the middle of a base.

    Args:
        name: Of its run directory.
        says: The strategy that it changes to, for people.
        base: Whose checkpoint it reads.
        slots: Ranks.
        sets: What is set beside what the base sets.
        config: Its experiment; "": the base's.
        is_exact: Whether its losses are to be the base's, bit for bit.
        is_rounded: Whether it computes in 16 bits.
    """

    name: str
    says: str
    base: Base
    slots: int
    sets: tuple[str, ...] = ()
    config: str = ""
    is_exact: bool = False
    is_rounded: bool = False


def _overwrite(key: str, value: object) -> str:
    return f"hyperparameters.overwrite_deepspeed_args.{key}={value}"


def _deepspeed(name: str) -> str:
    return f"hyperparameters.deepspeed_config=experiments/deepspeed/{name}.json"


REPLICAS = Base(name="zero1", says="ZeRO 1, 2 ranks", config="experiments/gpt2/const.yaml", slots=2)
STAGES = Base(
    name="pipeline",
    says="pipeline of 1 stage, ZeRO 1, 2 ranks",
    config="experiments/gpt2/pipeline_zero1.yaml",
    slots=2,
    sets=("hyperparameters.pipe_parallel_size=1", _overwrite("gradient_accumulation_steps", 2)),
)
CHANGES = (
    Change(name="same", says="the same", base=REPLICAS, slots=2, is_exact=True),
    Change(name="zero3", says="ZeRO 3, 2 ranks", base=REPLICAS, slots=2, sets=(_deepspeed("zero3"),)),
    Change(name="zero2_1", says="ZeRO 2, 1 rank", base=REPLICAS, slots=1, sets=(_deepspeed("zero2"),)),
    Change(name="zero1_4", says="ZeRO 1, 4 ranks", base=REPLICAS, slots=4),
    Change(
        name="zero0_1",
        says="ZeRO 0, 1 rank, micro-batch 4 x 8",
        base=REPLICAS,
        slots=1,
        sets=(_deepspeed("zero0"), _overwrite("train_micro_batch_size_per_gpu", 4)),
    ),
    Change(
        name="offload",
        says="ZeRO 3, offloaded, 2 ranks",
        base=REPLICAS,
        slots=2,
        sets=(_deepspeed("zero3_offload"),),
    ),
    Change(
        name="stages",
        says="pipeline of 2 stages, ZeRO 1, 2 ranks",
        base=REPLICAS,
        slots=2,
        config=STAGES.config,
    ),
    Change(
        name="pipeline2",
        says="pipeline of 2 stages, ZeRO 1, 4 ranks",
        base=STAGES,
        slots=4,
        sets=("hyperparameters.pipe_parallel_size=2", _overwrite("gradient_accumulation_steps", 4)),
    ),
    Change(
        name="bf16",
        says="ZeRO 1, bf16, 2 ranks",
        base=REPLICAS,
        slots=2,
        sets=(_overwrite("bf16.enabled", "true"),),
        is_rounded=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of a run.

    Args:
        losses: Step -> loss of training.
        validation: Loss of the validation at the end.
    """

    losses: dict[int, float]
    validation: float

    def away(self, base: Curve) -> dict[int, float]:
        """Step -> how far its loss is from that of the base."""
        return {step: abs(loss - base.losses[step]) for step, loss in self.losses.items()}


def trained(run_dir: Path, config: str, slots: int, sets: Sequence[str], *more: str) -> Curve:
    """A complete run, run now unless it is there already."""
    if not (run_dir / "result.json").is_file():
        click.echo(f"{run_dir.name} ...")
        words = [DET_DS, "run", config, ".", "--run-dir", run_dir, "--slots", str(slots), *more]
        settings = [word for each in (*SETTINGS, *sets) for word in ("--set", each)]
        command = [*words, *settings, "--accelerator", "cpu"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
        if done.returncode != 0:
            raise click.ClickException(f"{run_dir.name}: {done.stderr}")
    result = json.loads((run_dir / "result.json").read_text())
    if (result["status"], result["steps_completed"]) != ("completed", END):
        raise click.ClickException(f"{run_dir} is not complete; delete it to run it again")
    return curve_of(run_dir)


def curve_of(run_dir: Path) -> Curve:
    """What a complete run has reported."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {
        line["steps_completed"]: line["metrics"]["loss"] for line in lines if line["group"] == "training"
    }
    [validation] = [
        line["metrics"]["validation_loss"]
        for line in lines
        if line["group"] == "validation" and line["steps_completed"] == END
    ]
    return Curve(losses=losses, validation=validation)


def middle_of(run_dir: Path) -> Path:
    """The checkpoint that a base has written in the middle."""
    [found] = [
        each.path for each in checkpoints_in(run_dir / "checkpoints") if each.steps_completed == MIDDLE
    ]
    return Path(found)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A change beside its base.

    Args:
        change: What was changed.
        curve: Of the run that was resumed.
        away: Step after the change -> how far its loss is from the base's.
        validation: How far its last validation is.
    """

    change: Change
    curve: Curve
    away: dict[int, float]
    validation: float

    @property
    def failures(self) -> list[str]:
        """What the protocol does not allow."""
        if self.change.is_exact:
            return ["not bit for bit"] if max(*self.away.values(), self.validation) > 0 else []
        most = self.most(MIDDLE + FIRST)
        if self.change.is_rounded or most <= CLOSE:
            return []
        return [f"{most:.1e} in the first {FIRST} steps, more than {CLOSE:.0e}"]

    def most(self, end: int) -> float:
        """The largest difference up to a step."""
        return max(away for step, away in self.away.items() if step <= end)


def table(rows: Sequence[Row], without: float) -> str:
    """The deviations in Markdown.

    Args:
        rows: The changes.
        without: How far two uninterrupted runs under different strategies come apart.
    """
    ends = (MIDDLE + 1, MIDDLE + FIRST, (MIDDLE + END) // 2, END)
    heads = (*(f"step {end}" for end in ends), "validation")
    lines = [
        f"| trained under | after step {MIDDLE} under | {' | '.join(heads)} |",
        "|---" * (2 + len(heads)) + "|",
    ]
    for row in rows:
        values = (*(row.most(end) for end in ends), row.validation)
        cells = " | ".join(f"{value:.1e}" if value else "0" for value in values)
        lines.append(f"| {row.change.base.says} | {row.change.says} | {cells} |")
    return "\n".join([*lines, "", f"two uninterrupted runs of {END} steps: {without:.1e}"])


def picture(rows: Sequence[Row], bases: dict[str, Curve]) -> Figure:
    """The curves on top of each other, and below how far each is from the one that was not interrupted."""
    with drawing():
        figure, (losses, away) = figure_of([1.5, 2.6])
        base = bases[REPLICAS.name]
        losses.plot(list(base.losses), list(base.losses.values()), color=MUTED, linewidth=3.2, alpha=0.35)
        apart = bases[STAGES.name].away(base)
        away.plot(list(apart), so_far(apart), color=MUTED, linewidth=1.2, linestyle=(0, (4, 2)),
                  label="two uninterrupted runs: ZeRO 1, pipeline")  # fmt: skip
        for (colour, _), row in zip(PALETTE, [row for row in rows if not row.change.is_exact], strict=False):
            look: dict[str, Any] = {"color": colour, "linewidth": 1.2}
            losses.plot(list(row.curve.losses), list(row.curve.losses.values()), **look)
            away.plot(list(row.away), so_far(row.away), label=row.change.says, **look)
        losses.set_title(f"Loss of GPT-2, resumed at step {MIDDLE}")
        losses.set_ylabel("training loss")
        away.set_title("Difference from the uninterrupted run")
        away.set_yscale("log")
        exponents = range(-8, 1, 2)
        away.set_yticks(
            [10.0**each for each in exponents], [f"1e{each}" if each else "1" for each in exponents]
        )
        away.set_yticks([], minor=True)
        away.set_ylim(EXACT, 1)
        away.set_ylabel("the largest so far")
        away.set_xlabel("optimizer step")
        figure.legend(*away.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False,
                      fontsize=SMALL_PT - 1.5, columnspacing=1.2, handlelength=1.4)  # fmt: skip
        for panel in (losses, away):
            _along_steps(panel)
    return figure


def so_far(away: dict[int, float]) -> list[float]:
    """The largest so far at each step."""
    return list(itertools.accumulate((max(each, EXACT) for each in away.values()), max))


def _along_steps(panel: Axes) -> None:
    panel.set_xlim(0, END)
    panel.axvline(MIDDLE, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    panel.grid(axis="y")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--draw", type=click.Path(path_type=Path), help="File of the picture. Default: in FOLDER.")
def main(folder: Path, draw: Path | None) -> None:
    """Run the protocol in FOLDER, print its table and draw its curves."""
    bases = {
        base.name: trained(folder / base.name, base.config, base.slots, base.sets)
        for base in dict.fromkeys(change.base for change in CHANGES)
    }
    rows = []
    for change in CHANGES:
        base, middle = change.base, str(middle_of(folder / change.base.name))
        run_dir, sets = folder / f"{base.name}_{change.name}", (*base.sets, *change.sets)
        curve = trained(run_dir, change.config or base.config, change.slots, sets, "--resume", middle)
        whole = bases[base.name]
        validation = abs(curve.validation - whole.validation)
        rows.append(Row(change=change, curve=curve, away=curve.away(whole), validation=validation))
    apart = bases[STAGES.name].away(bases[REPLICAS.name])
    click.echo(table(rows, max(apart.values())))
    Image.open(io.BytesIO(png_of(picture(rows, bases)))).quantize(64).save(
        draw or folder / "curves.png", optimize=True
    )
    failures = [f"{row.change.says}: {failure}" for row in rows for failure in row.failures]
    for failure in failures:
        click.echo(f"FAILED  {failure}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
