"""Models as they are found: built by a trial on the meta device, or described by a hyperparameter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.harness.ranks import ROOT
from tests.memory.estimates import estimate, refused, settings


def test_a_model_that_is_no_transformer_is_counted_in_its_own_folder(tmp_path: Path) -> None:
    folder = ROOT / "tests" / "cli" / "own_model"
    own, other = (shutil.copytree(folder, tmp_path / name) for name in ("own", "other"))
    model = estimate(own / "experiment.yaml", own)["model"]
    assert (model["num_parameters"], model["num_layers"], model["sequence_length"]) == (5, 0, 0)
    assert model["activations"] is not None
    # Another folder's module of the same name is another module.
    code = (other / "trial.py").read_text()
    (other / "trial.py").write_text(code.replace("torch.nn.Linear(4, 1)", "1 / 0"))
    assert "division by zero" in refused(other / "experiment.yaml", other)


def test_every_way_to_recompute_activations_saves_as_much_memory() -> None:
    def row(*words: str, **hyperparameters: Any) -> dict[str, Any]:
        large = settings(sequence_length=1024, model_size="small", **hyperparameters)
        pipeline = ROOT / "experiments" / "gpt2" / "pipeline.yaml"
        return dict(estimate(pipeline, ROOT, *large, *words)["strategies"][0])

    without = row(overwrite_deepspeed_args__activation_checkpointing__partition_activations=True)
    recomputed = [
        row(activation_checkpointing=True),
        row(activation_checkpoint_interval=1),
        row(overwrite_deepspeed_args__pipeline__activation_checkpoint_interval=1),
        row("--activation-checkpointing", activation_checkpointing=True),  # said twice, done once
    ]
    assert not without["activation_checkpointing"]  # options of it turn nothing on
    assert all(found["activation_checkpointing"] for found in recomputed)
    assert len({found["activations_bytes"] for found in recomputed}) == 1
    assert recomputed[0]["activations_bytes"] < 0.5 * without["activations_bytes"]


def test_the_model_of_a_script_is_not_known() -> None:
    message = refused(ROOT / "experiments" / "hf_trainer" / "const.yaml", ROOT)
    assert "a script builds its model by itself" in message
    assert "--parameters" in message
