"""What is no training cannot be resumed, and is refused before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import read_document
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.launch.resuming import start_in
from determined_ds.protocol.checkpoint_files import files_of, fingerprint, write_manifest
from determined_ds.protocol.tensor_index import EngineIndex, write_index

ROOT = Path(__file__).parents[2]


def test_weights_alone(tmp_path: Path) -> None:
    """As ``det-ds checkpoint import`` writes them: the key that starts from them is named."""
    experiment = parse_experiment(read_document(ROOT / "experiments/gpt2/const.yaml", ROOT))
    path = tmp_path / "imported"
    (path / "model0").mkdir(parents=True)
    write_index(path / "model0", EngineIndex(tensors={}))
    (path / "trial_state.json").write_text(json.dumps({"batches_trained": 0}))
    write_manifest(path, {name: fingerprint(path / name) for name in files_of(path)}, {"steps_completed": 0})
    with pytest.raises(ConfigError, match="holds weights alone, without the state of a training") as told:
        start_in(tmp_path / "run", experiment, None, resume=str(path), stated=True, forks=True)
    assert "searcher.source_checkpoint_uuid=" in str(told.value)
    assert not (tmp_path / "run").exists()
