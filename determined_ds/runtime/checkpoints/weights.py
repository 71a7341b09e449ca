"""The whole weights of an engine out of a checkpoint, whatever ZeRO stage and however many slots wrote it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from determined_ds.trial.ddp import CHECKPOINT

WHOLE = ("mp_rank_00_model_states.pt", CHECKPOINT)


def engines_in(path: Path) -> int:
    """How many engines a checkpoint holds."""
    return sum(1 for found in path.glob("model*") if found.is_dir())


def weights_in(path: Path, engine: int) -> dict[str, Any]:
    """The weights of one engine; where ZeRO split them, they come from the optimizer's fp32 copy.

    Args:
        path: A checkpoint's folder.
        engine: Counted from 0.

    Returns:
        Name -> what ``.contiguous()`` makes a tensor on the CPU: of ZeRO 3 a part is merged only then, so that the
        whole need not fit in memory. Of a pipeline, names begin with the index of the layer.
    """
    folder = path / f"model{engine}"
    layers = sorted(folder.glob("layer_*-model_states.pt"))
    if layers:
        return {
            f"{_index(file)}.{name}": tensor
            for file in layers
            for name, tensor in torch.load(file, map_location="cpu").items()
        }
    weights: dict[str, Any] = {}
    whole = next((file for name in WHOLE if (file := folder / name).is_file()), None)
    if whole is not None:
        weights.update(torch.load(whole, map_location="cpu", mmap=True)["module"])
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints what it merges
            # Of ZeRO 1 it leaves out what is frozen, which is in the file above.
            weights.update(get_fp32_state_dict_from_zero_checkpoint(str(path), folder.name, lazy_mode=True))
    return weights


def _index(layer_file: Path) -> int:
    return int(layer_file.name.split("-")[0].removeprefix("layer_"))
