"""Every full-size model is the published one.

``check --memory`` builds the model on torch's meta device, and runs a micro-batch through it. The published numbers
are those of the Hugging Face hub, and for ViT those of torchvision, with ten classes in place of 1000.
"""

from __future__ import annotations

import pytest

from tests.harness.ranks import ROOT
from tests.memory.estimates import estimate

# template, what of its hyperparameters is another -> parameters
PUBLISHED = {
    ("gpt2/zero3_xl", "model_size=small"): 124_439_808,
    ("gpt2/zero3_xl", ""): 1_557_611_200,
    ("vit/zero3_huge", "model_size=base"): 86_567_656 - 990 * 769,
    ("vit/zero3_huge", ""): 632_045_800 - 990 * 1281,
    ("bert/zero3_large", "model_size=base"): 109_483_778,
    ("bert/zero3_large", ""): 335_143_938,
    ("causal_lm/zero3_full", ""): 8_030_261_248,  # Llama 3.1 8B
}


@pytest.mark.parametrize(("template", "change"), PUBLISHED, ids=map(" ".join, PUBLISHED))
def test_a_template_of_full_size_builds_the_published_model(template: str, change: str) -> None:
    sets = ["--set", f"hyperparameters.{change}"] if change else []
    model = estimate(ROOT / "experiments" / f"{template}.yaml", ROOT, *sets)["model"]
    assert model["num_parameters"] == PUBLISHED[template, change]
    assert (model["activations"] is None, model["assumptions"]) == (False, [])
