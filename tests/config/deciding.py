"""What several files here ask: parts of a DeepSpeed JSON, what is wrong with it, and what DeepSpeed reads in it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from determined_ds import ConfigError, Problem
from tests.package import ROOT, decide

KEYS = ROOT / "determined_ds" / "config" / "deepspeed_keys.json"
AUTO = "auto"
Json = dict[str, Any]


def optimizer(kind: str = "AdamW", **params: Any) -> Json:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str = "WarmupLR", **params: Any) -> Json:
    return {"scheduler": {"type": kind, "params": params}}


def zero(stage: Any, **settings: Any) -> Json:
    return {"zero_optimization": {"stage": stage, **settings}}


def nested(key: str, value: Any) -> Any:
    """A mapping with one value, at a dotted key."""
    for step in reversed(key.split(".")):
        value = {step: value}
    return value


def value_at(config: Any, key: str) -> Any:
    """The value at a dotted key; None where there is nothing."""
    for step in key.split("."):
        config = config.get(step) if isinstance(config, dict) else None
    return config


def told(
    hp: str | Mapping[str, Any] = "global_batch_size: 8", ds: str | Mapping[str, Any] = "{}", **how: Any
) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings of a decision, whichever way it ends."""
    try:
        return [], list(decide(hp, ds, **how).warnings)
    except ConfigError as error:
        return list(error.problems), list(error.warnings)


def known_keys(node: Json | None = None, above: str = "") -> Iterator[tuple[str, Json]]:
    """Every dotted key that DeepSpeed knows, with its types and range: see ``generate_deepspeed_keys.py``."""
    for name, child in (json.loads(KEYS.read_text()) if node is None else node).get("properties", {}).items():
        key = f"{above}.{name}".lstrip(".")
        yield key, child
        yield from known_keys(child, key)


def read_by_deepspeed(config: Json, replicas: int) -> Any:
    """DeepSpeed's own reading of a configuration; nothing is started."""
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
        from deepspeed.runtime import config as upstream

    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    with mock.patch.object(upstream.dist, "get_rank", return_value=0):
        return upstream.DeepSpeedConfig(config, mpu)
