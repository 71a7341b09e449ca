"""Models as small as can be: their hyperparameters and data, a training of each in ranks, and what it reported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.harness.ranks import ROOT
from tests.package import checkpoints, records

SEQUENCE_LENGTH = 32
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODEL_CONFIG = {"model_type": "llama", **SIZES}
# Model -> its trial, below model_defs.
TRIALS = {
    "bert": "bert.trial:BertTrial",
    "causal_lm": "causal_lm.trial:CausalLMTrial",
    "dcgan": "dcgan.trial:DCGANTrial",
    "drivable_vit": "drivable_vit.trial:DrivableViTTrial",
    "gpt2": "gpt2.trial:GPT2Trial",
    "gpt2 in a pipeline": "gpt2.trial:GPT2PipelineTrial",
    "vit": "vit.trial:ViTTrial",
}


def text_data(folder: Path) -> dict[str, Any]:
    """The section ``data`` of a text of 64 sequences, by its bytes."""
    (folder / "text.txt").write_text((ROOT / "LICENSE").read_text()[:2400])
    return {"path": str(folder / "text.txt"), "tokenizer": "bytes", "validation_fraction": 0.15}


def saved_model(folder: Path, seed: int = 3) -> Path:
    """A folder as ``save_pretrained`` writes it, over a vocabulary of bytes."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, vocab_size=256, eos_token_id=0, bos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def hyperparameters(zero_stage: int, **more: Any) -> dict[str, Any]:
    """A run of micro-batches of 2 on two ranks; ``model_config`` unless ``model`` is given."""
    model = {} if "model" in more else {"model_config": MODEL_CONFIG}
    return {
        "global_batch_size": 8,
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "zero_stage": zero_stage,
        "overwrite_deepspeed_args": {
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            # Small parameters would stay whole, and these are all small.
            "zero_optimization": {"stage3_param_persistence_threshold": 0} if zero_stage == 3 else {},
        },
        "sequence_length": SEQUENCE_LENGTH,
        "learning_rate": 0.003,
        "weight_decay": 0.1,
        "warmup_num_steps": 4,
        **model,
        **more,
    }


def train(
    run_dir: Path,
    hparams: dict[str, Any],
    data: dict[str, Any],
    batches: int = 4,
    *,
    resume: bool = False,
    model: str = "causal_lm",
    period: int | None = None,
    then: Callable[[Any], Any] | None = None,
    fork: str | None = None,
) -> Any:
    """Train in this rank, with a validation and a checkpoint at each ``period``; what ``then`` asks of the trial."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    module, _, name = TRIALS[model].partition(":")
    kind = getattr(importlib.import_module(f"model_defs.{module}"), name)
    exp_conf = {"data": data, "reproducibility": {"experiment_seed": 5}}
    with open_context(hparams=hparams, exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu") as context:
        trial = kind(context)
        Trainer(trial, context).fit(
            max_length=Batch(batches),
            reporting_period=Batch(1),
            validation_period=Batch(period or batches),
            checkpoint_period=Batch(period or batches),
            checkpoint_policy="none",
            latest_checkpoint=checkpoints(run_dir)[0].name if resume else None,
            fork=fork,
        )
        return then(trial) if then else None


def reported(run_dir: Path, *names: str, group: str = "training") -> list[float]:
    """What a run reported under each of these names, in order; under ``loss``, if none is given."""
    return [metrics[name] for name in names or ("loss",) for _, metrics in records(run_dir, group)]


def checkpoint(run_dir: Path) -> Path:
    (found,) = checkpoints(run_dir)
    return found
