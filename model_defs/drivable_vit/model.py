"""A multi-view drivable-space vision transformer, without anything special for ZeRO 3.

Patches attend within their image, then across the views of a moment, then across moments; a light decoder turns
them back into pixels. Every parameter is used in the forward of the module that owns it and nowhere else, which is
all that ZeRO 3 needs to gather it in time.

Legend of shape suffixes: B samples, M moments, V views, C colours, H height and W width of an image in pixels,
N patches of an image, T tokens that attend to each other, D embedding width, S groups of them, K decoder channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import deepspeed
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from model_defs.common.parameters import generator_of
from model_defs.common.sections import Section, config_error, parse_section

COLOURS = 3
INIT_STD = 0.02


class DrivableViTConfig(Section):
    """The hyperparameters of the model, under their own names."""

    img_size: int = Field(256, ge=1)
    """Height and width of an image, in pixels."""
    patch_size: int = Field(16, ge=1)
    """Height and width of a patch, in pixels; divides ``img_size``."""
    embed_dim: int = Field(768, ge=1)
    """D; ``num_heads`` divides it."""
    spatial_layers: int = Field(4, ge=0)
    """Blocks whose attention stays within an image."""
    cross_view_layers: int = Field(4, ge=0)
    """Blocks whose attention spans the views of a moment."""
    temporal_layers: int = Field(4, ge=0)
    """Blocks in which a patch attends to itself at this moment and those before."""
    num_heads: int = Field(12, ge=1)
    mlp_ratio: int = Field(4, ge=1)
    """Hidden width of a block's MLP, in units of D."""
    decoder_channels: int = Field(8, ge=1)
    """K, features of a pixel before the decoder's convolutions."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping what it computed."""


def model_config(hyperparameters: dict[str, Any]) -> DrivableViTConfig:
    """The model's configuration, out of all the hyperparameters.

    Raises:
        ConfigError: Everything that is wrong.
    """
    config = parse_section(DrivableViTConfig, hyperparameters)
    for name, of in (("patch_size", "img_size"), ("num_heads", "embed_dim")):
        divisor, number = getattr(config, name), getattr(config, of)
        if number % divisor:
            message, fix = (
                f"does not divide {of} {number}.",
                f"{of}: a multiple of {divisor}, or another {name}",
            )
            raise config_error(f"hyperparameters.{name}", divisor, message, fix)
    return config


class Patches(nn.Module):
    """pixels_BMVCHW -> hidden_BMVND: each patch through one linear layer."""

    def __init__(self, config: DrivableViTConfig) -> None:
        super().__init__()
        self.size = config.patch_size
        self.project = nn.Linear(COLOURS * config.patch_size**2, config.embed_dim)

    def forward(self, pixels_BMVCHW: Tensor) -> Tensor:
        patches = pixels_BMVCHW.unfold(-2, self.size, self.size).unfold(-2, self.size, self.size)
        values = patches.permute(0, 1, 2, 4, 5, 3, 6, 7).flatten(5).flatten(3, 4)
        return self.project(values)


class Positions(nn.Module):
    """Adds to each token where in its image it lies, which camera saw it, and when."""

    def __init__(self, config: DrivableViTConfig, num_views: int, num_moments: int) -> None:
        super().__init__()
        num_patches = (config.img_size // config.patch_size) ** 2
        self.patch_ND = nn.Parameter(torch.zeros(num_patches, config.embed_dim))
        self.view_VD = nn.Parameter(torch.zeros(num_views, config.embed_dim))
        self.moment_MD = nn.Parameter(torch.zeros(num_moments, config.embed_dim))

    def forward(self, hidden_BMVND: Tensor) -> Tensor:
        _, moments, views, _, _ = hidden_BMVND.shape
        where = self.patch_ND + self.view_VD[:views, None]
        # The last moment is always the present one, however many came before.
        return hidden_BMVND + where + self.moment_MD[-moments:, None, None]


class Attention(nn.Module):
    """Multi-head self-attention by ``scaled_dot_product_attention``: hidden_STD -> hidden_STD."""

    def __init__(self, config: DrivableViTConfig, *, causal: bool) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.causal = causal
        self.query_key_value = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.out = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, hidden_STD: Tensor) -> Tensor:
        heads = self.query_key_value(hidden_STD).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block, norms first: hidden_STD -> hidden_STD."""

    def __init__(self, config: DrivableViTConfig, *, causal: bool = False) -> None:
        super().__init__()
        wide = config.mlp_ratio * config.embed_dim
        self.norm_attention = nn.LayerNorm(config.embed_dim)
        self.attention = Attention(config, causal=causal)
        self.norm_mlp = nn.LayerNorm(config.embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.embed_dim, wide), nn.GELU(), nn.Linear(wide, config.embed_dim)
        )

    def forward(self, hidden_STD: Tensor) -> Tensor:
        hidden_STD = hidden_STD + self.attention(self.norm_attention(hidden_STD))
        return hidden_STD + self.mlp(self.norm_mlp(hidden_STD))


class Decoder(nn.Module):
    """hidden_BMVND and the pixels -> logits_BMVHW.

    A patch is unfolded into K features a pixel; two small convolutions beside the pixels themselves draw the
    edges that a patch is too coarse for.
    """

    def __init__(self, config: DrivableViTConfig) -> None:
        super().__init__()
        channels = config.decoder_channels
        self.side = config.img_size // config.patch_size
        self.size = config.patch_size
        self.norm = nn.LayerNorm(config.embed_dim)
        self.unfold = nn.Linear(config.embed_dim, channels * config.patch_size**2)
        self.mix = nn.Conv2d(channels + COLOURS, 2 * channels, kernel_size=3, padding=1)
        self.out = nn.Conv2d(2 * channels, 1, kernel_size=3, padding=1)

    def forward(self, hidden_BMVND: Tensor, pixels_BMVCHW: Tensor) -> Tensor:
        images = pixels_BMVCHW.flatten(0, 2)
        values = self.unfold(self.norm(hidden_BMVND)).flatten(0, 2)
        grid = values.unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)
        features = functional.pixel_shuffle(grid, self.size)
        features = functional.gelu(self.mix(torch.cat([features, images], dim=1)))
        return self.out(features)[:, 0].unflatten(0, pixels_BMVCHW.shape[:3])


class DrivableViT(nn.Module):
    """The whole model.

    Args:
        config: Its sizes.
        num_views: V, the most views of a moment.
        num_moments: M, the most moments of a sample.
        seed: Of the weights to start from, which depend on it and on each parameter's name alone.
    """

    def __init__(
        self, config: DrivableViTConfig, *, num_views: int = 3, num_moments: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config)
        self.positions = Positions(config, num_views, num_moments)
        self.spatial = nn.ModuleList(Block(config) for _ in range(config.spatial_layers))
        self.cross_view = nn.ModuleList(Block(config) for _ in range(config.cross_view_layers))
        self.temporal = nn.ModuleList(Block(config, causal=True) for _ in range(config.temporal_layers))
        self.decoder = Decoder(config)
        # Truncated normal matrices, zero biases, norms at one; each drawn from a generator of its own.
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.is_meta:
                    continue
                if parameter.ndim == 4:  # the decoder's convolutions
                    bound = (3 / parameter[0].numel()) ** 0.5
                    parameter.uniform_(-bound, bound, generator=generator_of(seed, name))
                elif parameter.ndim >= 2:
                    nn.init.trunc_normal_(parameter, std=INIT_STD, generator=generator_of(seed, name))
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, pixels_BMVCHW: Tensor) -> Tensor:
        """Logits of "one can drive here".

        Args:
            pixels_BMVCHW: About in [-1, 1], of any floating type; at most as many views and moments as configured.

        Returns:
            logits_BMVHW, of the model's type. A moment's do not depend on later moments.
        """
        pixels_BMVCHW = pixels_BMVCHW.to(self.patches.project.weight.dtype)
        hidden = self.positions(self.patches(pixels_BMVCHW))
        batch, moments, views, patches, width = hidden.shape
        hidden_STD = self._run(self.spatial, hidden.flatten(0, 2))
        hidden_STD = self._run(self.cross_view, hidden_STD.view(batch * moments, views * patches, width))
        by_patch = hidden_STD.view(batch, moments, views * patches, width).transpose(1, 2)
        hidden_STD = self._run(self.temporal, by_patch.reshape(-1, moments, width))
        hidden = hidden_STD.view(batch, views * patches, moments, width).transpose(1, 2)
        return self.decoder(hidden.reshape(batch, moments, views, patches, width), pixels_BMVCHW)

    def _run(self, blocks: nn.ModuleList, hidden_STD: Tensor) -> Tensor:
        is_kept = (
            not self.config.activation_checkpointing or hidden_STD.is_meta or not torch.is_grad_enabled()
        )
        for block in blocks:
            # DeepSpeed's, which has the options of the JSON's section activation_checkpointing.
            run = block if is_kept else partial(deepspeed.checkpointing.checkpoint, block)
            hidden_STD = run(hidden_STD)
        return hidden_STD


def mask_loss(logits_BMVHW: Tensor, masks_BMVHW: Tensor) -> Tensor:
    """Mean binary cross entropy a pixel, a float32 scalar whatever the logits' type.

    Args:
        logits_BMVHW: Floating point of any width.
        masks_BMVHW: 1 where one can drive, else 0; of any type.
    """
    return functional.binary_cross_entropy_with_logits(logits_BMVHW.float(), masks_BMVHW.float())
