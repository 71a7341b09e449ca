"""Every full-size model is the published one; and each runs on a device that holds no numbers.

``check --memory`` builds the model on torch's meta device, and runs a micro-batch through it. The published numbers
are those of the Hugging Face hub, and for ViT those of torchvision, with ten classes in place of 1000.
"""

from __future__ import annotations

import pytest
import torch

from model_defs.dcgan import model as dcgan
from model_defs.drivable_vit import model as drivable_vit
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


def test_dcgan_and_the_drivable_space_model_are_of_the_published_size() -> None:
    """DCGAN with group norms for batch norms; the other has twelve blocks of ViT-Base."""
    sizes = dcgan.DCGANConfig()
    with torch.device("meta"):
        generator, discriminator = dcgan.Generator(sizes), dcgan.Discriminator(sizes)
        drivable = drivable_vit.DrivableViT(drivable_vit.DrivableViTConfig())
    assert sum(p.numel() for p in generator.parameters()) == 3_576_704
    assert sum(p.numel() for p in discriminator.parameters()) == 2_765_568
    blocks = [p.numel() for name, p in drivable.named_parameters() if name.split(".")[1].isdigit()]
    assert sum(blocks) == 12 * 7_087_872


@pytest.mark.parametrize("template", ["causal_lm/const", "drivable_vit/const", "gpt2/pipeline"])
def test_every_model_runs_on_a_device_that_holds_no_numbers(template: str) -> None:
    model = estimate(ROOT / "experiments" / f"{template}.yaml", ROOT, "--precision", "bf16")["model"]
    assert (model["activations"]["element_bytes"], model["assumptions"]) == (2, [])
