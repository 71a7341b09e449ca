"""What a run ends with, compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.package import checkpoints, contents


def last_words(run_dir: Path) -> dict[str, Any]:
    """All that a run ends with: its metrics, but for clocks and memory, and what its last checkpoint holds."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [
        (
            line["group"],
            line["steps_completed"],
            {k: v for k, v in line["metrics"].items() if not is_measured(k)},
        )
        for line in lines
    ]
    return {"metrics": metrics, "states": contents(checkpoints(run_dir)[0])}


def hf_words(run_dir: Path) -> dict[str, Any]:
    """The same of a run of transformers' Trainer: its validations; weights, optimizer, schedule and generators."""
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "completed", result
    [folder] = (run_dir / "checkpoints" / result["checkpoint"]["uuid"]).glob("checkpoint-*")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "best": result["best"]["checkpoint"] is not None,
        "validations": [
            (line["steps_completed"], line["metrics"]["eval_loss"])
            for line in lines
            if line["group"] == "validation"
        ],
        "states": {
            file.name: _values(torch.load(file, map_location="cpu", weights_only=False))
            for file in sorted([*folder.rglob("*_states.pt"), *folder.glob("rng_state_*.pth")])
        },
    }


def _values(state: Any) -> Any:
    """The tensors and numbers of a nested state."""
    if isinstance(state, dict):
        return {key: _values(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return [_values(each) for each in state]
    return state if isinstance(state, (torch.Tensor, int, float)) else None


def is_measured(metric: str) -> bool:
    """Whether it tells of clocks and memory: no two runs have the same."""
    return metric == "bubble" or "per_second" in metric or "memory" in metric


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nested states differ, tensors to the last bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [f"{path}: tensors differ"]
    if isinstance(left, dict) and isinstance(right, dict):
        found = (
            [] if left.keys() == right.keys() else [f"{path}: {sorted(map(str, left.keys() ^ right.keys()))}"]
        )
        return found + [
            d
            for key in left.keys() & right.keys()
            for d in differences(left[key], right[key], f"{path}/{key}")
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} items"]
        return [
            d
            for i, (a, b) in enumerate(zip(left, right, strict=True))
            for d in differences(a, b, f"{path}[{i}]")
        ]
    if hasattr(left, "__dict__") and hasattr(right, "__dict__"):
        return differences(vars(left), vars(right), path)
    return [] if left == right else [f"{path}: {left!r} and {right!r}"]
