"""Trainings of the project's models that start from weights or leave the logits of their engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model_defs import tiny

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def hyperparameters(kind: str, zero_stage: int, **more: Any) -> dict[str, Any]:
    """The kinds are the models of :mod:`tests.model_defs.tiny`."""
    own: dict[str, Any] = {"sequence_length": 32} if kind.startswith(("gpt2", "bert")) else {}
    if kind == "causal_lm":
        own = tiny.hyperparameters(zero_stage, **more)
    overwritten = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}}
    return {
        **own,
        "global_batch_size": 4,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_num_steps": 1,
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "zero_stage": zero_stage,
        **more,
        "overwrite_deepspeed_args": {**overwritten, **more.get("overwrite_deepspeed_args", {})},
    }


def save_logits(run_dir: Path, model: str, trial: Any) -> None:
    """In each rank, after a training: save what the engine computes of :func:`inputs`."""
    import torch

    trial.engine.module.eval()
    with torch.no_grad():
        output = trial.engine(**inputs(model, next(trial.engine.module.parameters()).dtype))
    if trial.context.distributed.rank == 0:
        torch.save(getattr(output, "logits", output), run_dir / "logits.pt")


def inputs(model: str, dtype: Any) -> dict[str, Any]:
    """A batch of two samples, by the names of the engine's arguments."""
    import torch

    if model == "vit":
        pixels_BCHW = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
        return {"pixel_values": pixels_BCHW.to(dtype)}
    tokens_BT = (torch.arange(64) * 7 % 200).reshape(2, 32)
    return {"tokens_BT" if model == "gpt2" else "input_ids": tokens_BT}
