"""A cause of lost time that is planted in a training of GPT-2 on two ranks is named before all others."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.package import profile_of

# Cause -> the code of the finding that is to be first.
PLANTED = {"slow loader": "slow-loader", "slow rank": "slow-rank"}
STEPS = {"wait": 3, "warmup": 1, "active": 6}
# What is planted takes longer on a machine that has other work, as the step itself does.
HASHES = 20_000  # for each sample of the slow loader: 8 ms
PASSES = 6  # more through the model, on the slow rank


@pytest.mark.long("real trainings; test_causes has each cause in written traces")
@pytest.mark.parametrize("cause", PLANTED)
def test_what_is_planted_is_named_first(two_ranks: Ranks, tmp_path: Path, cause: str) -> None:
    two_ranks.run(train, tmp_path, cause)
    first, *_ = profile_of(tmp_path)["findings"]
    assert first["code"] == PLANTED[cause]


def train(run_dir: Path, cause: str) -> None:
    """Train the recorded steps in this rank."""
    import torch
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from model_defs.gpt2.trial import GPT2Trial

    class Slow(torch.utils.data.Dataset):  # type: ignore[type-arg]
        """Samples that take long to decode."""

        def __init__(self, samples: Any) -> None:
            self._samples = samples

        def __len__(self) -> int:
            return len(self._samples)

        def __getitem__(self, index: int) -> Any:
            hashlib.pbkdf2_hmac("sha256", b"sample", b"", HASHES)
            return self._samples[index]

    class Planted(GPT2Trial):
        """GPT-2 with a cause of lost time."""

        def loss(self, model: Any, batch: Any) -> Any:
            if cause == "slow rank" and os.environ["RANK"] == "1":
                with torch.no_grad():
                    for _ in range(PASSES):
                        model.module(batch[0])
            return super().loss(model, batch)

        def build_training_data_loader(self) -> Any:
            samples = self.data.train
            return self.training_loader(Slow(samples) if cause == "slow loader" else samples)

    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    }
    hparams = {
        "global_batch_size": 32,
        "deepspeed_config": ds_config,
        "model_size": "tiny",
        "sequence_length": 64,
    }
    experiment = {"data": {"path": None, "tokenizer": None}}
    with open_context(hparams=hparams, exp_conf=experiment, run_dir=run_dir, accelerator="cpu") as context:
        fit: dict[str, Any] = {"max_length": Batch(sum(STEPS.values())), "checkpoint_policy": "none"}
        Trainer(Planted(context), context).fit(**fit, profile=STEPS)
