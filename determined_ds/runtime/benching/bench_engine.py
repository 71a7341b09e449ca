"""DeepSpeed engines of a named strategy, for measurements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from determined_ds.config.strategy import PLAIN, Strategy
from determined_ds.memory.fitting import of_form
from determined_ds.memory.model import ModelShape
from determined_ds.runtime.benching.decoder import Decoder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def strategy_named(name: str, shape: ModelShape, *, precision: str, replicas: int) -> Strategy:
    """A strategy whose buckets hold the largest parameter of a model, and not much more.

    Args:
        name: Of :data:`determined_ds.config.strategy.PLAIN`, not a pipeline.
        shape: Of the model.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        replicas: Ranks.
    """
    largest = max(4 * shape.hidden_size**2, shape.vocab_size * shape.hidden_size)
    plain = Strategy(precision=precision, replicas=replicas, reduce_bucket_size=largest, overlap_comm=False)
    return of_form(replace(plain, prefetch_bucket_size=largest), Strategy(**PLAIN[name]))


def ds_config_of(strategy: Strategy) -> dict[str, Any]:
    """What DeepSpeed is given for a strategy: torch's AdamW, which needs no compiler."""
    zero: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "reduce_bucket_size": strategy.reduce_bucket_size,
        "stage3_prefetch_bucket_size": strategy.prefetch_bucket_size,
        "stage3_param_persistence_threshold": 0,
        "overlap_comm": False,
    }
    for part in ("offload_optimizer", "offload_param"):
        if device := getattr(strategy, part):
            zero[part] = {"device": device}
    return {
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": strategy.precision == "bf16"},
        "fp16": {"enabled": strategy.precision == "fp16"},
    }


@contextmanager
def engine_of(shape: ModelShape, strategy: Strategy, device: torch.device) -> Iterator[Any]:
    """An engine over all ranks; let go at the end, as far as DeepSpeed does: of ZeRO 3 it keeps buckets."""
    import deepspeed

    gc.collect()
    torch.manual_seed(0)
    model = Decoder(shape).to(device=device, dtype=DTYPES[strategy.precision])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config_of(strategy)
    )
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
