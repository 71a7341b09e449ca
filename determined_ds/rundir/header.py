"""What was decided for a run, in a few lines above its metrics: here, and in the log of a task. Loads no torch."""

from __future__ import annotations

import textwrap

from determined_ds.config.layout import BATCH_KEYS, Accelerator
from determined_ds.config.params import Duration
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import KeyPath, dotted
from determined_ds.errors import shown
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.launches import versions

WIDTH = 80


def decided(name: str, runs: str, resolved: ResolvedConfig, *, by_script: bool = False) -> list[str]:
    """The lines.

    Args:
        name: Of the experiment.
        runs: What it runs: ``MODULE:CLASS``, or a script.
        resolved: What was decided.
        by_script: Whether a script runs, which may go by something else than the experiment states.
    """
    topology, batch = resolved.topology, resolved.batch
    layout = count(topology.data_parallel_world_size, "replica")
    if topology.pipe_parallel_size > 1:
        layout += f" x {topology.pipe_parallel_size} pipeline stages"
    if topology.model_parallel_size > 1:
        layout += f" x {topology.model_parallel_size} model-parallel"
    if topology.sequence_parallel_size > 1:
        layout += f" x {topology.sequence_parallel_size} sequence-parallel"
    return [
        *_wrapped_title(f"{name}: {runs}"),
        f"  slots      {topology.slots} on {resolved.accelerator.name}: {layout}, ZeRO {resolved.zero_stage}",
        f"  batch      {batch.global_batch_size} = micro-batch {batch.micro_batch_size}"
        f" x {batch.accumulation} accumulated x {count(batch.replicas, 'replica')}",
        *_schedule(resolved),
        *_wrapped("filled in", _filled_in(resolved)),
        *(
            ["             as the experiment states it; the script decides whether it goes by it"]
            if by_script
            else []
        ),
        *_by_the_clock(resolved),
        *_wrapped("versions", _versions()),
    ]


def _schedule(resolved: ResolvedConfig) -> list[str]:
    """What a pipeline's measured bubble is to be compared with."""
    strategy = resolved.strategy
    if strategy.pipe_parallel_size == 1:
        return []
    chunks = f", {strategy.pipe_chunks} chunks a rank" if strategy.pipe_chunks > 1 else ""
    return [
        f"  schedule   {strategy.pipe_schedule}{chunks}: a bubble of {strategy.bubble:.4f} by its order alone"
    ]


def _by_the_clock(resolved: ResolvedConfig) -> list[str]:
    period = resolved.fit.checkpoint_period
    if not isinstance(period, Duration):
        return []
    return [f"  checkpoint after the first batch that ends {period.value:g} {period.unit} after the last one"]


def undecided(name: str, runs: str, slots: int, accelerator: Accelerator, *, by: str) -> list[str]:
    """The lines, where the configuration leaves the batch to the code.

    Args:
        name: Of the experiment.
        runs: What it runs.
        slots: Ranks in all.
        accelerator: What they compute on.
        by: Whose code decides it: ``the script`` or ``the trial``.
    """
    return [
        *_wrapped_title(f"{name}: {runs}"),
        f"  slots      {slots} on {accelerator.name}",
        f"  batch      decided by {by}",
        *_wrapped("versions", _versions()),
    ]


def _wrapped_title(title: str) -> list[str]:
    return textwrap.wrap(
        title, WIDTH, subsequent_indent=" " * 4, break_long_words=False, break_on_hyphens=False
    )


def _filled_in(resolved: ResolvedConfig) -> list[str]:
    """The values that the DeepSpeed JSON left open, except the batch sizes, which have their own line."""
    sizes: set[KeyPath] = {(key,) for key in BATCH_KEYS}
    values = {path: resolved.ds.get(path) for path in resolved.filled if path not in sizes}
    return [
        f"{dotted(path)} {f'{value:.6g}' if isinstance(value, float) else shown(value)}"
        for path, value in values.items()
    ]


def _versions() -> list[str]:
    return [f"{package} {version}" for package, version in versions(more=False).items()]


def _wrapped(title: str, entries: list[str]) -> list[str]:
    """Entries beside a title; no line where there are none."""
    return textwrap.wrap(
        ", ".join(entries),
        WIDTH,
        initial_indent=f"  {title:<10} ",
        subsequent_indent=" " * 13,
        break_long_words=False,
        break_on_hyphens=False,
    )
