"""DeepSpeed's universal layout, which its ``"checkpoint": {"load_universal": true}`` reads.

    latest_universal                                 the name of the folder beside it
    <tag>/mp_rank_00_model_states.pt                 counts, schedule; frozen weights and buffers
          zero_pp_rank_0_mp_rank_00_model_states.pt  the same file, under the name that ZeRO 3 looks for
          zero/optimizer_state.pt                    settings of the optimizer's groups
               <parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

Source: ``load_hp_checkpoint_state_from_checkpoint_dir`` in deepspeed 0.19.8's ``runtime/base_optimizer.py``, and the
like in ``runtime/zero/stage3.py``; ``_load_checkpoint`` in ``runtime/engine.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError
from determined_ds.export.outgoing import Outgoing, of_state, of_weight
from determined_ds.export.tensor_files import write_torch
from determined_ds.export.verified_engine import VerifiedEngine
from determined_ds.export.wanted import ExportPlan
from determined_ds.protocol.checkpoint_files import checkpoint_at
from determined_ds.protocol.tensor_index import MASTER, TRAINED, WEIGHT

FP32, STEP, PARAM = "fp32", "step", "param"
ADAMS_STATES = {"exp_avg", "exp_avg_sq"}
LATEST, STATES = (
    "latest_universal",
    ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
)
Tensors = dict[tuple[str, str], Outgoing]


def plan_universal(source: VerifiedEngine) -> ExportPlan:
    """What will be written.

    Raises:
        CheckpointError: there are no states of an optimizer, which DeepSpeed needs.
    """
    index = source.stored.index
    trained = [name for name, tensor in index.tensors.items() if tensor.kind == TRAINED]
    none = "any weight"
    bare = [name for name in trained if not _optimizer_states(source, name)]
    if bare or not trained:
        raise CheckpointError(
            f"checkpoint {source.path} has no optimizer's states of {next(iter(bare), none)}, which a universal "
            "checkpoint needs\n  fix: export one that was written after a step; or --to safetensors"
        )
    if any(name.partition(".")[0].isdigit() for name in index.aliases):
        raise CheckpointError(
            f"checkpoint {source.path} is of a pipeline with tied layers, whose names in DeepSpeed it does not hold\n"
            "  fix: resume it with pipe_parallel_size: 1 for a step and export that; or --to safetensors"
        )
    found: Tensors = {}
    for name in trained:
        found[name, FP32] = of_weight(source, name, torch.float32)
        for state in _optimizer_states(source, name):
            found[name, state] = of_state(source, name, state)
    others = {name: of_weight(source, name, None) for name in index.tensors if name not in trained}
    return ExportPlan(
        tensors={**{f"{name}/{state}": each for (name, state), each in found.items()}, **others},
        write=partial(_write, source=source, found=found, others=others),
        notes=tuple(_notes(source, found, others)),
    )


def _optimizer_states(source: VerifiedEngine, name: str) -> list[str]:
    states = source.stored.index.tensors[name].states
    return [state for state in states if state not in (WEIGHT, MASTER)]


def _notes(source: VerifiedEngine, found: Tensors, others: Mapping[str, Outgoing]) -> list[str]:
    notes = ["DeepSpeed loads it under ZeRO 1, 2 and 3 at any number of ranks; not under ZeRO 0"]
    if {state for _, state in found} - {FP32} != ADAMS_STATES:
        notes.append(f"{source.stored.index.optimizer} has other states than Adam: ZeRO 3 does not load them")
    if others:
        notes.append(
            f"DeepSpeed loads no frozen weights and no buffers of a universal checkpoint: {next(iter(others))} and "
            f"{len(others) - 1} more keep what the model is built with; they are under 'module' in {STATES[0]}"
        )
    if len(source.stored.settings["groups"]) > 1:
        notes.append("under ZeRO 3, DeepSpeed gives all groups of the optimizer the settings of the first")
    if source.computes_in == torch.float16:
        notes.append("the loss scale of fp16 begins anew")
    return notes


def _write(
    out: Path,
    advance: Callable[[int], None],
    *,
    source: VerifiedEngine,
    found: Tensors,
    others: Mapping[str, Outgoing],
) -> None:
    tag = f"global_step{checkpoint_at(source.path).steps_completed}"
    zero = out / tag / "zero"
    zero.mkdir(parents=True)
    index = source.stored.index
    for (name, state), each in found.items():
        folder = zero / name
        folder.mkdir(exist_ok=True)
        torch.save({PARAM: each.whole()}, folder / f"{state}.pt")
        advance(each.num_bytes)
    for name in {name for name, _ in found}:
        if STEP in index.tensors[name].scalars:
            torch.save(_step(index.optimizer, index.tensors[name].scalars[STEP]), zero / name / f"{STEP}.pt")
    for common, name in index.common.items():
        if (zero / name).is_dir() and not (zero / common).exists():
            (zero / common).mkdir()
            for file in (zero / name).iterdir():
                os.link(file, zero / common / file.name)
    torch.save(_optimizer_state(source), zero / "optimizer_state.pt")
    write_torch(
        out / tag / STATES[0], advance, tensors=others, aliases={}, beside=_model_states(source), key="module"
    )
    os.link(out / tag / STATES[0], out / tag / STATES[1])
    (out / LATEST).write_text(tag)


def _step(optimizer: str, step: float) -> Any:
    """In the type that the optimizer keeps: torch's own keep tensors, DeepSpeed's plain numbers."""
    return int(step) if optimizer.startswith(("Fused", "DeepSpeed")) else torch.tensor(float(step))


def _optimizer_state(source: VerifiedEngine) -> dict[str, Any]:
    import deepspeed

    settings, index = source.stored.settings, source.stored.index
    groups = [{**group["settings"], "params": []} for group in settings["groups"]]
    stages = len(list((source.path / f"model{source.engine}").glob("settings_stage*.pt"))) or 1
    groups = groups[: len(groups) // stages]  # each stage of a pipeline has the same groups
    steps = [tensor.scalars[STEP] for tensor in index.tensors.values() if STEP in tensor.scalars]
    step = _step(index.optimizer, max(steps, default=0))
    clip = (settings["built"] or {}).get("clip_grad")
    return {
        "ds_version": deepspeed.__version__,
        "clip_grad": float(clip or 0.0),
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {STEP: step}}, "param_groups": groups},
    }


def _model_states(source: VerifiedEngine) -> dict[str, Any]:
    import deepspeed
    from deepspeed.checkpoint.constants import (
        UNIVERSAL_CHECKPOINT_INFO,
        UNIVERSAL_CHECKPOINT_VERSION_KEY,
        UNIVERSAL_CHECKPOINT_VERSION_VALUE,
    )

    settings = source.stored.settings
    counts = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0, **settings["counters"]}
    return {
        **counts,
        "lr_scheduler": settings["lr_scheduler"],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": deepspeed.__version__,
        UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE},
    }
