"""The sizes and hyperparameters of ViT; the model is ``transformers.ViTForImageClassification``, as it is."""

from __future__ import annotations

from typing import Literal

from model_defs.common.classifier import ClassifierOptions, size

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

    model_size: Literal["tiny", "small", "base", "large", "huge"] = "tiny"
    """One of :data:`MODEL_SIZES`; of no effect where ``pretrained`` is given, which has its own."""
