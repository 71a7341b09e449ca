"""Trainings of the project's models, two batches long; each leaves its engine's logits beside its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model_defs import tiny

LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
BATCHES = 2


def hyperparameters(kind: str, zero_stage: int, **more: Any) -> dict[str, Any]:
    """A kind is the name of a folder of model_defs."""
    own: dict[str, Any] = {"sequence_length": 32} if kind in ("gpt2", "gpt2_pipeline", "bert") else {}
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


def train(
    kind: str,
    run_dir: str,
    hparams: dict[str, Any],
    data: dict[str, Any],
    *,
    batches: int = BATCHES,
    start: str | None = None,
) -> None:
    """In a rank: train, from the weights of a checkpoint, and save what the engine computes of :func:`inputs`.

    The model is of a ``kind``, ``data`` the section of its experiment.
    """
    import torch
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    exp_conf = {"data": data, "reproducibility": {"experiment_seed": 5}}
    with open_context(hparams=hparams, exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_class(kind)(context)
        Trainer(trial, context).fit(max_length=Batch(batches), reporting_period=Batch(batches), fork=start)
        if kind == "gpt2_pipeline":
            return
        trial.engine.module.eval()
        with torch.no_grad():
            output = trial.engine(**inputs(kind, next(trial.engine.module.parameters()).dtype))
        if context.distributed.rank == 0:
            torch.save(getattr(output, "logits", output), Path(run_dir) / "logits.pt")


def trial_class(kind: str) -> Any:
    """The trial of a kind."""
    import importlib

    name = {
        "gpt2": "GPT2Trial",
        "gpt2_pipeline": "GPT2PipelineTrial",
        "bert": "BertTrial",
        "causal_lm": "CausalLMTrial",
        "vit": "ViTTrial",
    }[kind]
    return getattr(importlib.import_module(f"model_defs.{kind.removesuffix('_pipeline')}.trial"), name)


def inputs(kind: str, dtype: Any) -> dict[str, Any]:
    """A batch of two samples, by the names of the engine's arguments."""
    import torch

    if kind == "vit":
        pixels_BCHW = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
        return {"pixel_values": pixels_BCHW.to(dtype)}
    tokens_BT = (torch.arange(64) * 7 % 200).reshape(2, 32)
    return {"tokens_BT" if kind == "gpt2" else "input_ids": tokens_BT}
