"""DCGAN's two models: published size and start, shapes, independence of images, losses and Fréchet distance."""

from __future__ import annotations

import pytest
import torch

from model_defs.dcgan.model import DCGANConfig, Discriminator, Generator, dcgan_config
from model_defs.dcgan.trial import FrechetDistance, features, frechet_distance

SMALL = {"image_size": 16, "latent_size": 6, "generator_features": 8, "discriminator_features": 4}


def test_full_size_parameters() -> None:
    """Those of DCGAN at 64 x 64 with 100 latents and 64 features, group norms for batch norms."""
    with torch.device("meta"):
        generator, discriminator = Generator(DCGANConfig()), Discriminator(DCGANConfig())
    assert sum(p.numel() for p in generator.parameters()) == 3_576_704
    assert sum(p.numel() for p in discriminator.parameters()) == 2_765_568


@pytest.mark.parametrize("image_size", [8, 16, 32])
@pytest.mark.parametrize("num_colours", [1, 3])
def test_shapes(image_size: int, num_colours: int) -> None:
    config = dcgan_config({**SMALL, "image_size": image_size}, num_colours=num_colours)
    images = Generator(config)(torch.randn(5, 6))
    assert images.shape == (5, num_colours, image_size, image_size)
    assert images.abs().max() <= 1
    assert Discriminator(config)(images).shape == (5,)


@torch.no_grad()
def test_an_image_does_not_depend_on_the_others() -> None:
    config = dcgan_config(SMALL)
    generator, discriminator = Generator(config), Discriminator(config)
    latents = torch.randn(4, 6)
    images = generator(latents)
    assert torch.allclose(images[:1], generator(latents[:1]), atol=1e-6)
    assert torch.allclose(discriminator(images)[2:], discriminator(images[2:]), atol=1e-6)


# -------------------------------------------------------------------------------------- Fréchet distance


def test_the_distance_is_of_all_ranks_together() -> None:
    """Shared out unevenly, with a rank that has nothing, it is what one rank computes; and what numpy does."""
    torch.manual_seed(0)
    real, generated = torch.rand(40, 1, 8, 8), torch.rand(40, 1, 8, 8) * 0.5
    whole, first, second, idle = (FrechetDistance() for _ in range(4))
    whole.update(real, generated)
    first.update(real[:7], generated[:7])
    second.update(real[7:20], generated[7:20])
    second.update(real[20:], generated[20:])
    alone = whole.cross_slot_reduce([whole.per_slot_reduce()])
    shared = whole.cross_slot_reduce([each.per_slot_reduce() for each in (first, idle, second)])
    assert shared == pytest.approx(alone, rel=1e-9)
    sides = [features(images) for images in (real, generated)]
    moments = [each.mean(0) for each in sides], [torch.cov(each.T, correction=0) for each in sides]
    assert alone == pytest.approx(frechet_distance(*moments), rel=1e-6)
