"""ViT by a named size or from a checkpoint: ``transformers.ViTForImageClassification``, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import transformers
from torch import nn

from model_defs.common.classifier import ClassifierOptions, base_config, build_classifier, size

# As published: base google/vit-base-patch16-224, large google/vit-large-patch16-224, huge
# google/vit-huge-patch14-224-in21k, small WinKawaks/vit-small-patch16-224. "tiny" is ours, for tests and laptops.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "tiny": size(64, 4, 4, patch_size=4, image_size=16),
    "small": size(384, 12, 6, patch_size=16, image_size=224),
    "base": size(768, 12, 12, patch_size=16, image_size=224),
    "large": size(1024, 24, 16, patch_size=16, image_size=224),
    "huge": size(1280, 32, 16, patch_size=14, image_size=224),
}
# New for another number of classes; a checkpoint may have a pooler, this model has none.
HEAD = ("classifier.",)
# One vector for all images, and one for each patch: no more to be drawn to zero than a bias.
NO_DECAY = ("cls_token", "position_embeddings")


class Options(ClassifierOptions):
    """The hyperparameters that this model reads."""

    model_size: Literal["tiny", "small", "base", "large", "huge"] | None = "tiny"
    """One of :data:`MODEL_SIZES`; None takes the size of ``pretrained``."""


def vit_config(
    options: Options, classes: Sequence[str], *, only_sizes: bool = False
) -> transformers.ViTConfig:
    """The configuration of the model; see :func:`model_defs.common.classifier.base_config`.

    Raises:
        ConfigError: More classes than ``num_labels``, or a checkpoint that does not fit.
    """
    sizes = MODEL_SIZES[options.model_size] if options.model_size else None
    config = base_config(options, classes, model_type="vit", sizes=sizes, only_sizes=only_sizes)
    return transformers.ViTConfig.from_dict(config)


def build_vit(options: Options, config: transformers.ViTConfig, seed: int) -> nn.Module:
    """The model; see :func:`model_defs.common.classifier.build_classifier`."""
    return build_classifier(transformers.ViTForImageClassification, options, config, head=HEAD, seed=seed)
