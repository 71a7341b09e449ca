"""The lines above a run: what was decided. The log of a cluster's task begins with them, too. Loads no torch."""

from __future__ import annotations

import functools
import textwrap

from determined_ds.config.layout import BATCH_KEYS, Accelerator, Batch
from determined_ds.config.params import Duration
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import dotted
from determined_ds.errors import shown
from determined_ds.report.numbers import count
from determined_ds.rundir.records import versions

BY_SCRIPT = "             as the experiment states it; the script decides whether it goes by it"
wrap = functools.partial(textwrap.wrap, width=80, break_long_words=False, break_on_hyphens=False)


def in_micro_batches(batch: Batch) -> str:
    """A global batch: ``32 = micro-batch 8 x 2 accumulated x 2 replicas``."""
    sizes = f"micro-batch {batch.micro_batch_size} x {batch.accumulation} accumulated"
    return f"{batch.global_batch_size} = {sizes} x {count(batch.replicas, 'replica')}"


def decided(
    name: str,
    runs: str,
    resolved: ResolvedConfig | None,
    slots: int,
    accelerator: Accelerator,
    *,
    by_script: bool = False,
) -> list[str]:
    """The lines above a run.

    Args:
        name: Of the experiment.
        runs: What it runs: ``MODULE:CLASS``, or a script.
        resolved: What was decided; None where the configuration leaves the batch to the code.
        slots: Ranks in all.
        accelerator: What they compute on.
        by_script: Whether a script runs, which may go by something else than the experiment states.
    """

    def line(title: str, *entries: str) -> list[str]:
        return wrap(", ".join(entries), initial_indent=f"  {title:<10} ", subsequent_indent=" " * 13)

    lines, where = wrap(f"{name}: {runs}", subsequent_indent="    "), f"{slots} on {accelerator.name}"
    used = line("versions", *(f"{package} {version}" for package, version in versions(more=False).items()))
    if resolved is None:
        by = "script" if by_script else "trial"
        return [*lines, *line("slots", where), *line("batch", f"decided by the {by}"), *used]
    topology, batch, strategy = resolved.topology, resolved.batch, resolved.strategy
    degrees = {
        "pipeline stages": topology.pipe_parallel_size,
        "model-parallel": topology.model_parallel_size,
        "sequence-parallel": topology.sequence_parallel_size,
    }
    layout = " x ".join(
        [
            count(topology.data_parallel_world_size, "replica"),
            *(f"{num} {what}" for what, num in degrees.items() if num > 1),
        ]
    )
    experts = strategy.expert_parallel_size
    shared = f", experts shared by {experts} ranks" if experts > 1 else ""
    lines += [f"  slots      {where}: {layout}, ZeRO {resolved.zero_stage}{shared}"]
    lines += [f"  batch      {in_micro_batches(batch)}"]
    if strategy.pipe_parallel_size > 1:  # what a pipeline's measured bubble is to be compared with
        chunks = f", {strategy.pipe_chunks} chunks a rank" if strategy.pipe_chunks > 1 else ""
        bubble = f"a bubble of {strategy.bubble:.4f} by its order alone"
        lines.append(f"  schedule   {strategy.pipe_schedule}{chunks}: {bubble}")
    filled = []  # what the DeepSpeed JSON left open, except the batch sizes, which have their own line
    for path in resolved.filled:
        if path[0] not in BATCH_KEYS or path[1:]:
            value = resolved.ds.get(path)
            filled.append(f"{dotted(path)} {f'{value:.6g}' if isinstance(value, float) else shown(value)}")
    lines += line("filled in", *filled)
    lines += [BY_SCRIPT] if by_script else []
    if isinstance(period := resolved.fit.checkpoint_period, Duration):
        after = f"after the first batch that ends {period.value:g} {period.unit} after the last one"
        lines.append(f"  checkpoint {after}")
    return [*lines, *used]
