"""Every full-size model is the published one; and each runs on a device that holds no numbers.

Nothing is allocated: ``check --memory`` builds the model on torch's meta device, and runs a micro-batch through it,
forward and backward. As a GPU would, that refuses a tensor that was left on the CPU. The published numbers are those of
the checkpoints on the Hugging Face hub, and for ViT those that torchvision states, with ten classes in place of 1000.
"""

from __future__ import annotations

import pytest

from tests.harness.ranks import ROOT
from tests.memory.estimates import estimate

# template, what of its hyperparameters is another -> parameters
PUBLISHED = {
    ("gpt2/zero3_xl", "model_size=small"): 124_439_808,
    ("gpt2/zero3_xl", "model_size=medium"): 354_823_168,
    ("gpt2/zero3_xl", "model_size=large"): 774_030_080,
    ("gpt2/zero3_xl", ""): 1_557_611_200,
    ("vit/zero3_huge", "model_size=small"): 22_050_664 - 990 * 385,
    ("vit/zero3_huge", "model_size=base"): 86_567_656 - 990 * 769,
    ("vit/zero3_huge", "model_size=large"): 304_326_632 - 990 * 1025,
    ("vit/zero3_huge", ""): 632_045_800 - 990 * 1281,
    ("bert/zero3_large", "model_size=base"): 109_483_778,
    ("bert/zero3_large", ""): 335_143_938,
    ("causal_lm/zero3_full", ""): 8_030_261_248,  # Llama 3.1 8B
}


@pytest.mark.parametrize(
    ("template", "changes"), PUBLISHED, ids=[" ".join(case).strip() for case in PUBLISHED]
)
def test_a_template_of_full_size_builds_the_published_model(template: str, changes: str) -> None:
    sets = [word for change in changes.split() for word in ("--set", f"hyperparameters.{change}")]
    model = estimate(ROOT / "experiments" / f"{template}.yaml", ROOT, *sets)["model"]
    assert model["num_parameters"] == PUBLISHED[template, changes]
    assert (model["activations"] is None, model["assumptions"]) == (False, [])


@pytest.mark.parametrize(
    "template",
    ["bert/const", "causal_lm/const", "drivable_vit/const", "gpt2/const", "gpt2/pipeline", "vit/const"],
)
def test_every_model_runs_on_a_device_that_holds_no_numbers(template: str) -> None:
    model = estimate(ROOT / "experiments" / f"{template}.yaml", ROOT, "--precision", "bf16")["model"]
    assert (model["activations"]["element_bytes"], model["assumptions"]) == (2, [])
