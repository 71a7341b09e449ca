"""What a run ends with, compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.package import checkpoints, contents, records


def last_words(run_dir: Path) -> dict[str, Any]:
    """All that a run ends with: its metrics, but for clocks and memory, and what its last checkpoint holds."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["time"]
        line["metrics"] = {name: value for name, value in line["metrics"].items() if not is_measured(name)}
    return {"metrics": lines, "states": contents(checkpoints(run_dir)[0])}


def losses_of(run_dir: Path) -> dict[tuple[str, int], float]:
    """The losses of both kinds at each report, of which there is one each."""
    found: dict[tuple[str, int], float] = {}
    for group, loss in {"training": "loss", "validation": "validation_loss"}.items():
        reports = records(run_dir, group)
        found |= {(group, steps): metrics[loss] for steps, metrics in reports}
        assert len(reports) == len({steps for steps, _ in reports})
    return found


def hf_words(run_dir: Path) -> dict[str, Any]:
    """The same of a run of transformers' Trainer: its validations; weights, optimizer, schedule and generators."""
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "completed", result
    [folder] = (run_dir / "checkpoints" / result["checkpoint"]["uuid"]).glob("checkpoint-*")
    files = sorted([*folder.rglob("*_states.pt"), *folder.glob("rng_state_*.pth")])
    return {
        "best": result["best"]["checkpoint"] is not None,
        "validations": [(steps, metrics["eval_loss"]) for steps, metrics in records(run_dir, "validation")],
        "states": {file.name: _values(torch.load(file, "cpu", weights_only=False)) for file in files},
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
    if hasattr(left, "__dict__") and hasattr(right, "__dict__") and not isinstance(left, dict):
        left, right = vars(left), vars(right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return [] if left == right else [f"{path}: {left!r} and {right!r}"]
    found = [f"{path}/{key}: in one alone" for key in left.keys() ^ right.keys()]
    for key in left.keys() & right.keys():
        found += differences(left[key], right[key], f"{path}/{key}")
    return found
