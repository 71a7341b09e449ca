"""ViT by a named size or from a checkpoint: ``transformers.ViTForImageClassification``, as it is.

Legend of shape suffixes: B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from determined_ds.errors import ConfigError, Problem
from model_defs.vit.pretrained import load_pretrained, pretrained_config
from model_defs.vit.sections import flag, number, one_of, parse_section, text, whole


def _size(width: int, layers: int, heads: int, patch_size: int, image_size: int = 224) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "patch_size": patch_size,
        "image_size": image_size,
    }


# As published: base google/vit-base-patch16-224, large google/vit-large-patch16-224, huge
# google/vit-huge-patch14-224-in21k, small WinKawaks/vit-small-patch16-224. "tiny" is ours, for tests and laptops.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "tiny": _size(64, 4, 4, patch_size=4, image_size=16),
    "small": _size(384, 12, 6, patch_size=16),
    "base": _size(768, 12, 12, patch_size=16),
    "large": _size(1024, 24, 16, patch_size=16),
    "huge": _size(1280, 32, 16, patch_size=14),
}
# What a checkpoint of another number of classes has anew; a checkpoint may have a pooler, this model has none.
HEAD = ("classifier.",)
# One vector for all images, and one for each patch: as little to be drawn to zero as a bias.
NO_DECAY = ("cls_token", "position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The hyperparameters that are this model's."""

    model_size: str | None = "tiny"
    """One of :data:`MODEL_SIZES`; None takes the size of ``pretrained``."""
    pretrained: str | None = None
    """Folder or hub name of a ViT checkpoint to start from; None: random weights, drawn by the seed."""
    num_labels: int | None = None
    """Outputs of the head; None: the classes of the data."""
    dropout: float = 0.0
    """Probability in [0, 1), of residual paths and of attention alike."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed."""


RULES = {
    "model_size": one_of(MODEL_SIZES, optional=True),
    "pretrained": text(),
    "num_labels": whole(2, optional=True),
    "dropout": number(0, 1, "a number from 0 to below 1", low_included=True),
    "activation_checkpointing": flag(),
}


def parse_options(hparams: dict[str, Any]) -> Options:
    """This model's hyperparameters out of all of them.

    Raises:
        ConfigError: Everything that is wrong with them.
    """
    options = parse_section(Options, hparams, RULES, section="hyperparameters", closed=False)
    if options.model_size is None and options.pretrained is None:
        message, fix = (
            "is null, and so is pretrained: nothing says how large the model is.",
            "model_size: tiny",
        )
        raise ConfigError(Problem(key="hyperparameters.model_size", value=None, message=message, fix=fix))
    return options


def vit_config(
    options: Options, classes: Sequence[str], *, from_size: bool = False
) -> transformers.ViTConfig:
    """The configuration of the model, its labels named.

    Args:
        options: What to build.
        classes: Names of the classes of the data, by label.
        from_size: Take the named size even where there is a checkpoint: only the sizes are asked for.

    Raises:
        ConfigError: More classes than ``num_labels``, or a checkpoint that does not do.
    """
    num_labels = options.num_labels or len(classes)
    if num_labels < len(classes):
        raise ConfigError(
            Problem(
                key="hyperparameters.num_labels",
                value=num_labels,
                message=f"the data has {len(classes)} classes, and labels from {num_labels} on would lie outside.",
                fix=f"num_labels: {len(classes)}; or null, which takes what the data has",
            )
        )
    sizes = MODEL_SIZES[options.model_size] if options.model_size is not None else None
    config: dict[str, Any] = dict(sizes or {})
    if options.pretrained is not None and not (from_size and sizes):
        config = pretrained_config(options.pretrained, model_type="vit", sizes=sizes)
    names = {label: f"LABEL_{label}" for label in range(num_labels)} | dict(enumerate(classes))
    config |= {
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.dropout,
    }
    config.pop("num_labels", None)  # the names say it
    return transformers.ViTConfig.from_dict(config)


def build_vit(options: Options, config: transformers.ViTConfig, seed: int) -> nn.Module:
    """The model on the current device, the same for the same seed whatever was drawn before.

    Raises:
        ConfigError: The checkpoint's weights cannot be read, or do not fit.
    """
    on_meta = torch.empty(0).is_meta
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        if options.pretrained is not None and not on_meta:
            model = load_pretrained(
                transformers.ViTForImageClassification, options.pretrained, config, head=HEAD
            )
        else:
            model = transformers.ViTForImageClassification(config)
    if options.activation_checkpointing:
        checkpoint_layers(model)
    return model.train()


def checkpoint_layers(model: Any) -> None:
    """Have each layer computed again in the backward pass.

    By torch's reentrant form: the other compares the shapes of parameters then and now, and those of ZeRO 3 come and
    go with their layer.
    """
    # transformers has given it another name in the course of its fifth version.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})


def parameter_groups(model: nn.Module, no_decay: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms, which are vectors, and parameters with these names in theirs do not.

    Args:
        model: Its parameters are whole, not yet partitioned.
        no_decay: Parts of names.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            vector = parameter.ndim < 2 or any(part in name for part in no_decay)
            (kept if vector else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
