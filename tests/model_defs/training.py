"""Trainings of the models, as the ranks of a test run them, and what they reported."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def train(
    run_dir: Path,
    hparams: dict[str, Any],
    data: dict[str, Any],
    batches: int = 8,
    latest_checkpoint: str | None = None,
    *,
    model: str = "causal_lm",
    period: int | None = None,
    then: Callable[[Any], Any] | None = None,
) -> Any:
    """Train in this rank, with a report at each batch, and a validation and a checkpoint at the end.

    The trial is that of ``model`` in ``TRIALS``. ``period`` counts the batches between validations and between
    checkpoints, if not all; ``then`` is what is asked of the trial at the end, and returned.
    """
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    module, _, name = TRIALS[model].partition(":")
    kind = getattr(importlib.import_module(f"model_defs.{module}"), name)
    with open_context(
        hparams=hparams,
        exp_conf={"data": data, "reproducibility": {"experiment_seed": 5}},
        run_dir=run_dir,
        accelerator="cpu",
    ) as context:
        trial = kind(context)
        Trainer(trial, context).fit(
            max_length=Batch(batches),
            reporting_period=Batch(1),
            validation_period=Batch(period or batches),
            checkpoint_period=Batch(period or batches),
            checkpoint_policy="none",
            latest_checkpoint=latest_checkpoint,
        )
        return then(trial) if then else None


def reported(run_dir: Path, *names: str, group: str = "training") -> list[float]:
    """What a run reported under each of these names, in order; under ``loss``, if none is given."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    of_group = [line["metrics"] for line in lines if line["group"] == group]
    return [metrics[name] for name in names or ("loss",) for metrics in of_group]
