"""GPT-2 in two ranks with one planted cause of lost time, recorded by torch's profiler."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from determined_ds.profile.analysis import analyse
from determined_ds.profile.step_parts import Profile
from determined_ds.protocol.profile_files import traces_in
from tests.ranks import Ranks

# Cause -> the code of the finding that is to be first.
PLANTED = {
    "slow loader": "slow-loader",
    "slow rank": "slow-rank",
    "needless sync": "needless-sync",
    "tiny bucket": "small-bucket",
}
CLEAN = "clean"
STEPS = {"wait": 3, "warmup": 1, "active": 6}
# What is planted takes longer on a machine that has other work, as the step itself does.
HASHES = 20_000  # for each sample of the slow loader: 8 ms
PASSES = 3  # more through the model, on the slow rank
WIDTH = 8192  # of what is gathered needlessly: 8 MB a rank


def profile_of(ranks: Ranks, run_dir: Path, cause: str) -> Profile:
    """Train with a cause in it, and read the traces.

    Args:
        ranks: Two of them.
        run_dir: A new folder.
        cause: Of :data:`PLANTED`, or :data:`CLEAN`.
    """
    ranks.run(train, run_dir, cause)
    return analyse(traces_in(run_dir))


def train(run_dir: Path, cause: str) -> None:
    """Train the recorded steps in this rank."""
    import torch
    import torch.distributed as dist
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
        """GPT-2, and something that costs time."""

        def loss(self, model: Any, batch: Any) -> Any:
            if cause == "slow rank" and os.environ["RANK"] == "1":
                with torch.no_grad():
                    for _ in range(PASSES):
                        model.module(batch[0])
            found = super().loss(model, batch)
            if cause == "needless sync":
                count_tokens(batch[0])
            return found

        def build_training_data_loader(self) -> Any:
            samples = self.data.train
            return self.training_loader(Slow(samples) if cause == "slow loader" else samples)

    def count_tokens(tokens_BT: torch.Tensor) -> None:
        """How often each token was seen by all ranks."""
        counts = torch.nn.functional.one_hot(tokens_BT, WIDTH).float()
        everywhere = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, counts)

    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 1000 if cause == "tiny bucket" else 5_000_000,
        },
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


def mistakes(profile: Profile, cause: str) -> list[str]:
    """What is wrong with the findings of :func:`profile_of`; empty where nothing is."""
    found = [each.code for each in profile.findings]
    shown = ", ".join(f"{each.code} {100 * each.share:.0f} %" for each in profile.findings) or "nothing"
    if cause == CLEAN:
        return [f"found {shown}" for code in PLANTED.values() if code in found]
    return [] if found[:1] == [PLANTED[cause]] else [f"found {shown}"]
