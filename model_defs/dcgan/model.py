"""DCGAN: a generator of images and a discriminator that judges them, both of strided convolutions.

The published layers and sizes (Radford et al., arXiv 1511.06434), but for the norm: batch normalisation makes an
image depend on the others of its micro-batch, so that ranks and accumulation would change what is computed, and
keeps running statistics that differ from rank to rank. Group normalisation has as many parameters and neither.

Legend of shape suffixes: B images, Z latent numbers, C colours, H height and W width of an image.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from model_defs.common.parameters import generator_of
from model_defs.common.sections import Section, config_error, parse_section

SMALLEST = 4  # height and width where the generator begins and the discriminator ends
INIT_STD = 0.02
SLOPE = 0.2
MAX_GROUPS = 8


class DCGANConfig(Section):
    """The hyperparameters of both models, under their own names."""

    image_size: int = Field(64, ge=1)
    """Height and width of an image in pixels: 8, 16, 32, 64, ..."""
    latent_size: int = Field(100, ge=1)
    """Z, random numbers that an image is made of."""
    generator_features: int = Field(64, ge=1)
    """Channels of the generator's last hidden layer; they double towards its first."""
    discriminator_features: int = Field(64, ge=1)
    """Channels of the discriminator's first layer; they double towards its last."""

    def widths(self, narrowest: int) -> list[int]:
        """Channels of the layers that each halve the image's height and width, from the narrowest on."""
        return [narrowest * 2**step for step in range(int(math.log2(self.image_size // SMALLEST)))]


def dcgan_config(hyperparameters: dict[str, Any]) -> DCGANConfig:
    """The configuration of the models, out of all the hyperparameters.

    Raises:
        ConfigError: Everything that is wrong.
    """
    config = parse_section(DCGANConfig, hyperparameters)
    size = config.image_size
    if size < 2 * SMALLEST or size & (size - 1):
        message = "must be a power of two, at least 8: each layer doubles the height and width."
        raise config_error("hyperparameters.image_size", size, message, "image_size: 8, 16, 32, 64, ...")
    return config


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(channels, MAX_GROUPS), channels)


class Generator(nn.Module):
    """latents_BZ -> images_BCHW in [-1, 1].

    Args:
        config: Its sizes.
        num_colours: C.
        seed: Of the weights to start from, which depend on it and on each parameter's name alone.
    """

    def __init__(self, config: DCGANConfig, *, num_colours: int = 3, seed: int = 0) -> None:
        super().__init__()
        widths = config.widths(config.generator_features)[::-1]
        layers: list[nn.Module] = [nn.ConvTranspose2d(config.latent_size, widths[0], SMALLEST, bias=False)]
        for wide, narrow in itertools.pairwise([*widths, num_colours]):
            doubling = nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1, bias=False)
            layers += [_norm(wide), nn.ReLU(), doubling]
        self.layers = nn.Sequential(*layers)
        _initialize(self, seed, "generator")

    def forward(self, latents_BZ: Tensor) -> Tensor:
        weight = next(self.parameters())
        return torch.tanh(self.layers(latents_BZ.to(weight.dtype)[:, :, None, None]))


class Discriminator(nn.Module):
    """images_BCHW in [-1, 1] -> logits_B of "this one is real".

    Args:
        config: Its sizes.
        num_colours: C.
        seed: Of the weights to start from.
    """

    def __init__(self, config: DCGANConfig, *, num_colours: int = 3, seed: int = 0) -> None:
        super().__init__()
        widths = config.widths(config.discriminator_features)
        layers: list[nn.Module] = [
            nn.Conv2d(num_colours, widths[0], 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(SLOPE),
        ]
        for narrow, wide in itertools.pairwise(widths):
            halving = nn.Conv2d(narrow, wide, 4, stride=2, padding=1, bias=False)
            layers += [halving, _norm(wide), nn.LeakyReLU(SLOPE)]
        layers.append(nn.Conv2d(widths[-1], 1, SMALLEST, bias=False))
        self.layers = nn.Sequential(*layers)
        _initialize(self, seed, "discriminator")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        weight = next(self.parameters())
        return self.layers(images_BCHW.to(weight.dtype)).flatten()


@torch.no_grad()
def _initialize(model: nn.Module, seed: int, prefix: str) -> None:
    """Convolutions from N(0, 0.02²), as published; norms start at one and zero, as torch has them."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 4 and not parameter.is_meta:
            parameter.normal_(0.0, INIT_STD, generator=generator_of(seed, f"{prefix}.{name}"))


def discriminator_loss(real_B: Tensor, generated_B: Tensor) -> Tensor:
    """Cross entropy of "real" and of "generated", each a mean over its images, added; float32.

    Args:
        real_B: Logits of real images, of any floating type.
        generated_B: Logits of generated ones.
    """
    return functional.softplus(-real_B.float()).mean() + functional.softplus(generated_B.float()).mean()


def generator_loss(generated_B: Tensor) -> Tensor:
    """Cross entropy of "real" on generated images: the form that does not fade while the generator is bad."""
    return functional.softplus(-generated_B.float()).mean()
