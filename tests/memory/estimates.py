"""``det-ds check --memory``, as programs read it."""

from __future__ import annotations

import json
import math
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


def refused(*words: str | Path | int) -> str:
    """Why there is no estimate."""
    result = CliRunner().invoke(main, ["check", *map(str, words), "--memory"])
    assert result.exit_code == 2, result.output
    assert "fix: " in result.stderr
    return result.stderr


def resolved(
    stage: int = 0,
    precision: str = "bf16",
    *,
    ranks: int = 1,
    micro: int = 1,
    accumulation: int = 1,
    zero: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **hyperparameters: Any,
) -> ResolvedConfig:
    """A training by Adam, with ``more`` keys of the DeepSpeed JSON."""
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        **(more or {}),
    }
    shared = [hyperparameters.get(f"{axis}_parallel_size", 1) for axis in ("sequence", "model")]
    hyperparameters["global_batch_size"] = micro * accumulation * ranks // math.prod(shared)
    return decide(hyperparameters, config, slots=ranks, accelerator=CUDA)


def settings(**overrides: Any) -> list[str]:
    """Hyperparameters as options; what is within one is divided from it by two underscores."""
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    texts = [f"hyperparameters.{name}={json.dumps(value)}" for name, value in named.items()]
    return [word for text in texts for word in ("--set", text)]
