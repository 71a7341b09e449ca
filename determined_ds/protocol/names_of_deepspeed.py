"""What the names of DeepSpeed's own files say of an engine that it wrote. Loads no torch.

Source: ``_get_ckpt_name`` and ``_get_zero_ckpt_name`` in deepspeed 0.19.8's ``runtime/engine.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

UNIVERSAL = "zero"  # folder of the states in a universal checkpoint
DDP_FILE = "ddp.pt"  # of torch's DistributedDataParallel
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an engine was divided.

    Args:
        zero_stage: 0; 1 for 1 and 2, which are written alike; or 3.
        replicas: Ranks that divided its states; 1 without ZeRO.
        stages: Pipeline stages.
    """

    zero_stage: int
    replicas: int
    stages: int


def layout_of(folder: Path) -> Layout | None:
    """How the engine in ``model<I>`` was divided; None where the files are not DeepSpeed's, or universal."""
    if (folder / UNIVERSAL).is_dir():
        return None
    ranks = [match for file in folder.glob("*optim_states.pt") if (match := _OPTIMIZER.fullmatch(file.name))]
    mains = len([*folder.glob("mp_rank_*_model_states.pt"), *folder.glob(DDP_FILE)])
    if ranks:
        is_split = any(folder.glob("zero_pp_rank_*_model_states.pt"))
        stages = len({match[2] for match in ranks})
        return Layout(zero_stage=3 if is_split else 1, replicas=len(ranks) // stages, stages=stages)
    return Layout(zero_stage=0, replicas=1, stages=mains) if mains else None


def why_rigid(folder: Path) -> str | None:
    """Why only the ranks that wrote an engine, under their strategy, can read it; None where others can."""
    layout, has_layers = layout_of(folder), any(folder.glob("layer_*-model_states.pt"))
    if any(folder.glob("*expert*")) or any(folder.glob("*expp_rank*")):
        return "it has experts"
    if any(folder.glob("offloaded_tensors")):
        return "its states were on NVMe"
    if layout is None:
        return None if (folder / UNIVERSAL).is_dir() else "its files are not DeepSpeed's"
    if layout.stages > 1 and not has_layers:
        return "it is tensor-parallel"
    if has_layers and not layout.zero_stage:
        return (
            "DeepSpeed wrote it as a pipeline without ZeRO, its optimizer's states by numbers of each stage"
        )
    return None
