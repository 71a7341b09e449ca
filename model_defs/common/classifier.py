"""A Hugging Face classifier by a named size or from a checkpoint, with a head for the classes of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from pydantic import Field
from torch import nn

from model_defs.common.huggingface import KEY, enable_activation_checkpointing, misfits, quiet, unloadable
from model_defs.common.sections import Section, config_error


class ClassifierOptions(Section):
    """The hyperparameters that every classifier reads, beside its ``model_size``."""

    pretrained: str | None = Field(None, min_length=1)
    """Folder or hub name of a checkpoint to start from; None: random weights, drawn by the seed."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of residual paths and of attention alike."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed."""


def size(width: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    """A published size in the words of a Hugging Face configuration."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        **more,
    }


def classifier_config(kind: Any, options: ClassifierOptions, classes: Sequence[str], **more: Any) -> Any:
    """The configuration of a classifier, its labels named.

    Args:
        kind: The configuration class of Hugging Face.
        options: What to build.
        classes: Names of the classes of the data, by label.
        more: Of the configuration, besides; sizes among it give way to those of a checkpoint.

    Returns:
        A configuration of that class.

    Raises:
        ConfigError: A checkpoint that cannot be read, or is of another model.
    """
    config: dict[str, Any] = {}
    if (source := options.pretrained) is not None:
        try:
            config, _ = transformers.PretrainedConfig.get_config_dict(source)
            if "model_type" not in config:  # transformers makes an empty one of a folder without one
                raise OSError("there is no config.json with a model_type")
        except Exception as error:  # What it raises differs by what is missing, broken or out of reach.
            raise unloadable(source, error) from error
        if (found := config["model_type"]) != kind.model_type:
            fix = f"a checkpoint of a {kind.model_type}, or the trial of a {found}"
            raise config_error(KEY, source, f"is a checkpoint of {found!r}, not of {kind.model_type!r}.", fix)
        config.pop("num_labels", None)  # the names say it
    return kind.from_dict(
        more
        | config
        | {
            "id2label": dict(enumerate(classes)),
            "label2id": {name: label for label, name in enumerate(classes)},
            "hidden_dropout_prob": options.dropout,
            "attention_probs_dropout_prob": options.dropout,
        }
    )


def build_classifier(
    kind: Any, options: ClassifierOptions, config: Any, *, head: tuple[str, ...], seed: int
) -> nn.Module:
    """The model on the current device, the same for the same seed whatever was drawn before.

    Args:
        kind: The Hugging Face class.
        options: What to build.
        config: Its configuration.
        head: Prefixes of the parameters that are new where a checkpoint lacks them, or has them in another shape.
        seed: Of the random weights.

    Raises:
        ConfigError: The checkpoint's weights cannot be read, or are missing or of other shapes outside the head.
    """
    source, wrong = options.pretrained, ""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        if source is None or torch.empty(0).is_meta:
            model = kind(config)
        else:
            try:
                with quiet():
                    model, info = kind.from_pretrained(
                        source,
                        config=config,
                        ignore_mismatched_sizes=True,  # those outside the head are refused below
                        output_loading_info=True,
                        dtype=torch.float32,
                    )
            except Exception as error:  # as above
                raise unloadable(source, error) from error
            wrong = misfits(info, except_for=head)
    if wrong:
        fix = "save the checkpoint again, its weights and its config.json together"
        raise config_error(KEY, source, f"its weights do not fit: {wrong}.", fix)
    if options.activation_checkpointing:
        enable_activation_checkpointing(model)
    trained: nn.Module = model.train()
    return trained
