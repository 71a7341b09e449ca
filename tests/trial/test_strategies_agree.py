"""The strategy changes how a step is computed, and nothing of what it computes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks


def train(run_dir: Path, trial: str, hparams: dict[str, Any], exp_conf: dict[str, Any], steps: int) -> float:
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from model_defs.gpt2 import trial as trials

    start = time.time()
    with open_context(hparams=hparams, exp_conf=exp_conf, run_dir=run_dir, accelerator="cpu") as context:
        instance = getattr(trials, trial)(context)
        Trainer(instance, context).fit(
            max_length=Batch(steps), reporting_period=Batch(1), validation_period=Batch(steps), checkpoint_policy="none"
        )
    return time.time() - start


BASE = {
    "global_batch_size": 8,
    "model_size": "tiny",
    "sequence_length": 32,
    "dropout": 0.0,
    "learning_rate": 0.003,
    "weight_decay": 0.01,
    "warmup_num_steps": 10,
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "pipe", 0, "pipe", 3])
def test_x(two_ranks: Ranks, tmp_path: Path, stage) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} {i * i % 97} " for i in range(8000)))
    hp = dict(BASE)
    if stage == "pipe":
        hp |= {"deepspeed_config": "experiments/deepspeed/pipeline.json", "pipe_parallel_size": 2,
               "overwrite_deepspeed_args": {"gradient_accumulation_steps": 4}}
    else:
        hp |= {"deepspeed_config": f"experiments/deepspeed/zero{stage}.json"}
    t = two_ranks.run(train, tmp_path / "run", "GPT2PipelineTrial" if stage == "pipe" else "GPT2Trial", hp, {"data": {"path": str(text), "max_validation_sequences": 5}}, 20)
    lines = [json.loads(l) for l in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [l["metrics"]["loss"] for l in lines if l["group"] == "training"]
    print(stage, t, losses[:3], losses[-1], lines[-1])
