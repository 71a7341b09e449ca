"""Why ranks share the sequences of a planned training."""

from __future__ import annotations

from dataclasses import replace

from determined_ds.config.strategy import Strategy
from determined_ds.memory import format_bytes, memory_per_rank
from determined_ds.memory.plan.needs import PlanRequest


def sequences_in_words(needs: PlanRequest, strategy: Strategy) -> dict[str, tuple[str, str]]:
    """The number of ranks that share a sequence, and why; nothing where sequences are whole.

    Args:
        needs: What is planned for.
        strategy: That was chosen.
    """
    size = strategy.sequence_parallel_size
    if size == 1:
        return {}
    if 1 in needs.splits:
        whole = replace(
            strategy,
            sequence_parallel_size=1,
            replicas=strategy.shards,
            micro_batch_size=1,
            activation_checkpointing=True,
        )
        needed = format_bytes(memory_per_rank(needs.shape, whole).total_bytes)
        reason = f"for one whole sequence a rank would need {needed}, activation checkpointing included"
    else:
        reason = f"a step has {needs.global_batch_size} sequences, fewer than the {needs.gpus} GPUs"
    reason += f"; {size} divides the tokens of a sequence, and must divide the attention heads of the model"
    return {"sequence_parallel_size": (f"{size} ranks to a sequence", reason)}
