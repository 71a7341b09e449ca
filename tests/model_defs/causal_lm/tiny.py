"""A small model, a small text, and a run over both, for the tests of ``causal_lm``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.harness.ranks import ROOT
from tests.model_defs.training import reported

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


def text_file(folder: Path) -> str:
    """A text of 64 sequences."""
    path = folder / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text()[:2400])
    return str(path)


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


def curve(run_dir: Path) -> list[float]:
    """Losses and norms of a run's steps, and the losses of its validations."""
    return reported(run_dir, "loss", "grad_norm") + reported(run_dir, "validation_loss", group="validation")


def checkpoint(run_dir: Path) -> Path:
    (found,) = (run_dir / "checkpoints").iterdir()
    return found
