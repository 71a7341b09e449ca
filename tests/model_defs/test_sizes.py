"""Every full-size model is the published one: its template is built on the meta device, and its parameters counted.

Nothing is allocated: the largest would take 32 GB. The published numbers are those of the checkpoints on the
Hugging Face hub, and for ViT with the head of ImageNet's thousand classes those that torchvision states.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from determined_ds.config.accelerator import Accelerator
from determined_ds.experiment.experiment import load_experiment
from determined_ds.runtime.shapes.of_experiment import shape_of_experiment
from tests.making import resolved_of
from tests.ranks import ROOT

CUDA = Accelerator(name="cuda", num_devices=8, bf16=True, fp16=True)
# template, what of its hyperparameters is another -> parameters
PUBLISHED = {
    ("gpt2/zero3_xl", "model_size=small"): 124_439_808,
    ("gpt2/zero3_xl", "model_size=medium"): 354_823_168,
    ("gpt2/zero3_xl", "model_size=large"): 774_030_080,
    ("gpt2/zero3_xl", ""): 1_557_611_200,
    ("vit/zero3_huge", "num_labels=1000 model_size=base"): 86_567_656,
    ("vit/zero3_huge", "num_labels=1000"): 632_045_800,
    ("bert/zero3_large", "num_labels=2 model_size=base"): 109_483_778,
    ("bert/zero3_large", "num_labels=2"): 335_143_938,
    ("causal_lm/zero3_full", ""): 8_030_261_248,  # Llama 3.1 8B
}
MISTRAL_7B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("template", "changes"), PUBLISHED, ids=[" ".join(case).strip() for case in PUBLISHED]
)
def test_a_template_of_full_size_builds_the_published_model(template: str, changes: str) -> None:
    path = ROOT / "experiments" / f"{template}.yaml"
    experiment = load_experiment(path, [f"hyperparameters.{change}" for change in changes.split()])
    resolved = resolved_of(experiment)
    assert resolved.zero_stage == 3
    shape = shape_of_experiment(experiment, resolved, ROOT)
    assert shape.num_parameters == PUBLISHED[template, changes]
    assert shape.activations is not None, "it runs on the meta device, too"


def test_any_causal_language_model_by_its_configuration() -> None:
    from model_defs.causal_lm.config import read_config
    from model_defs.causal_lm.model import build_model

    config = read_config(None, {"model_type": "mistral", **MISTRAL_7B}, vocab_size=256)
    with torch.device("meta"):
        model = build_model(config, None, seed=0, dtype=torch.float32, zero3=None)
    assert isinstance(model, transformers.PreTrainedModel)
    assert model.num_parameters() == 7_241_732_096
