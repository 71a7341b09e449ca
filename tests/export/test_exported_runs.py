"""Averages of an EMA, and what transformers' Trainer has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml

from determined_ds import load_state_dict_from_checkpoint_path
from determined_ds.export.exporting import export
from determined_ds.export.wanted import ExportRequest
from determined_ds.protocol.checkpoint_files import checkpoints_in
from tests.command import ROOT, det_ds
from tests.ranks import Ranks
from tests.transformers.test_resume import experiment
from tests.trial import test_ema


@pytest.mark.parametrize("kind", ["3", "pipeline"])
def test_averages_in_place_of_the_weights(kind: str, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(test_ema.train, tmp_path, kind, "fp32", 3)
    path = checkpoints_in(tmp_path / "checkpoints")[0].path
    out = export(ExportRequest(path=path, to="safetensors", out=tmp_path / "out", average="ema")).out
    found = safetensors.torch.load_file(out / "model.safetensors")
    expected = load_state_dict_from_checkpoint_path(path, average="ema")
    weights = load_state_dict_from_checkpoint_path(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(found[name], weights[name]) for name in expected)


@pytest.mark.parametrize(
    "zero_stage", [pytest.param(1, marks=pytest.mark.long("under ZeRO 3 it holds the least")), 3]
)
def test_a_checkpoint_of_transformers_trainer(zero_stage: int, tmp_path: Path) -> None:
    """Its configuration lies in the checkpoint; under ZeRO 3 its weights lie there in parts alone."""
    config: dict[str, Any] = experiment(zero_stage)
    config["hyperparameters"]["fit"]["max_length"] = {"batches": 3}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    done = det_ds("run", tmp_path / "experiment.yaml", ROOT, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    path = checkpoints_in(tmp_path / "run/checkpoints")[0].path
    out = export(ExportRequest(path=path, to="huggingface", out=tmp_path / "out")).out
    found = safetensors.torch.load_file(out / "model.safetensors")
    said = json.loads((out / "config.json").read_text())["architectures"]
    import transformers

    model = getattr(transformers, said[0]).from_pretrained(out)
    assert found.keys() <= model.state_dict().keys()
    [written] = path.glob("checkpoint-*/model.safetensors") if zero_stage == 1 else [None]
    if written is not None:
        theirs = safetensors.torch.load_file(written)
        assert all(torch.equal(found[name], theirs[name]) for name in found)
