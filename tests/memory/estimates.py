"""``det-ds check --memory``, as programs read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from determined_ds import ResolvedConfig
from determined_ds.cli.main import main
from tests.package import CUDA, decide


def estimate(*words: str | Path | int) -> dict[str, Any]:
    """What it says of a model: ``model``, and a row of bytes for each of ``strategies`` and ``schedules``."""
    result = CliRunner().invoke(main, ["check", *map(str, words), "--memory", "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def resolved(
    stage: int = 0,
    precision: str = "bf16",
    *,
    ranks: int = 1,
    micro: int = 1,
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> ResolvedConfig:
    """A training by Adam, with ``more`` keys of the DeepSpeed JSON."""
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        **{section: {"enabled": precision == section} for section in ("bf16", "fp16")},
        **(more or {}),
    }
    total = {"global_batch_size": micro * accumulation * ranks}
    return decide(total, config, slots=ranks, accelerator=CUDA)


def settings(**overrides: Any) -> list[str]:
    """Hyperparameters as options; what is within one is divided from it by two underscores."""
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    texts = [f"hyperparameters.{name}={json.dumps(value)}" for name, value in named.items()]
    return [word for text in texts for word in ("--set", text)]
