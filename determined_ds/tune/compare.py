"""What ``det-ds compare`` was given -> a comparison, or every reason why there is none; and the same in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from determined_ds.config.keys import MEASURE, ignored_by_ddp, ignored_keys
from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.launch.interrupts import Interrupts
from determined_ds.protocol.run_dir import RUNS, new_run_dir, slug
from determined_ds.protocol.run_lock import check_run_dir
from determined_ds.report.measurements import Results
from determined_ds.tune.choice import read_base
from determined_ds.tune.interleaved import Comparison, Told
from determined_ds.tune.variants import check_names, named_variants


def prepare_comparison(
    config: Path,
    context_dir: Path,
    *,
    strategies: Sequence[str],
    slots: Sequence[int] | None,
    steps: int,
    warmup: int,
    repeat: int,
    overrides: Iterable[str] = (),
    run_dir: Path | None = None,
    accelerator: str | None = None,
    command: str = "",
    now: datetime,
    tell: Told = print,
) -> Comparison:
    """Decide a comparison from what ``det-ds compare`` was given.

    Raises:
        ConfigError: a name is misspelt, the experiment cannot run as it is, or the folder cannot be written to.
    """
    found = Problems()
    found.of(lambda: check_names(strategies))
    document = found.of(lambda: read_document(config, context_dir, overrides=overrides, command="compare"))
    devices = found.of(lambda: detect_accelerator(accelerator))
    found.raise_any()
    assert document is not None
    assert devices is not None
    found.warn(ignored_keys(document, MEASURE))
    base = found.need(lambda: read_base(document, context_dir, devices))
    found.warn([*base.resolved.warnings, *(ignored_by_ddp(base.written) if "ddp" in strategies else ())])
    where = run_dir or new_run_dir(RUNS / f"{slug(base.experiment.name)}_compare", now)
    found.of(lambda: check_run_dir(where))
    found.raise_any()
    for warning in found.warnings:
        tell(f"warning: {warning}")
    return Comparison(
        base=base,
        variants=named_variants(base, strategies, slots or [base.experiment.slots]),
        run_dir=where.resolve(),
        steps=steps,
        warmup=warmup,
        repeat=repeat,
        title=base.experiment.name,
        command=command,
        created=now.isoformat(timespec="seconds"),
        tell=tell,
    )


def compare(
    config: str | os.PathLike[str],
    context_dir: str | os.PathLike[str] = ".",
    *,
    strategies: Sequence[str],
    slots: Sequence[int] | None = None,
    steps: int = 30,
    warmup: int = 5,
    repeat: int = 3,
    overrides: Iterable[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    accelerator: str | None = None,
) -> Results:
    """Measure strategies for an experiment, as ``det-ds compare`` does.

    Each strategy runs in fresh processes on this machine, with the same model, data, seed and global batch, several
    times, in turns. From a script, call it under ``if __name__ == "__main__":``.

    Args:
        config: The experiment's YAML.
        context_dir: The folder with the code.
        strategies: E.g. ``["zero0", "zero3", "pipeline"]``; the first is what the others are held against.
        slots: Numbers of ranks, each >= 1; the experiment's own, if None.
        steps: Optimizer steps to measure each time, >= 1.
        warmup: Steps before them.
        repeat: Times that each is measured, >= 1.
        overrides: ``KEY=VALUE`` laid over the YAML, as ``--set``.
        run_dir: Where the report and the runs go; ``runs/<name>_compare/<time>``, if None.
        accelerator: ``cpu``, ``cuda`` or None for the best there is.

    Returns:
        The rows, one a strategy and number of slots; what failed is a row that says why.

    Raises:
        ConfigError: it cannot be done; every reason at once.
    """
    numbers = {"steps": steps, "repeat": repeat, **{f"slots {count}": count for count in slots or ()}}
    wrong = [name for name, value in numbers.items() if value < 1]
    if wrong:
        raise ConfigError([Problem(key=name, message="must be 1 or more", fix="e.g. 1") for name in wrong])
    comparison = prepare_comparison(
        Path(config),
        Path(context_dir),
        strategies=strategies,
        slots=slots,
        steps=steps,
        warmup=warmup,
        repeat=repeat,
        overrides=overrides,
        run_dir=None if run_dir is None else Path(run_dir),
        accelerator=accelerator,
        command="determined_ds.compare(...)",
        now=datetime.now(),
    )
    with Interrupts("ending the measurement") as interrupts:
        return comparison.run(interrupts)
