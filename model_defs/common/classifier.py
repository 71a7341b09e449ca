"""A Hugging Face classifier by a named size or from a checkpoint, with a head for the classes of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import transformers
from pydantic import Field
from torch import nn

from model_defs.common.huggingface import (
    KEY,
    enable_activation_checkpointing,
    misfits,
    quiet,
    shortened,
    unloadable,
)
from model_defs.common.sections import Section, config_error, parse_section

K = TypeVar("K", bound="ClassifierOptions")


class ClassifierOptions(Section):
    """The hyperparameters that every classifier reads; a model lists its sizes and has its own dropout."""

    model_size: str | None = "tiny"
    """A published size; None takes the size of ``pretrained``."""
    pretrained: str | None = Field(None, min_length=1)
    """Folder or hub name of a checkpoint to start from; None: random weights, drawn by the seed."""
    num_labels: int | None = Field(None, ge=2)
    """Outputs of the head; None: the classes of the data."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of residual paths and of attention alike."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed."""


def parse_options(kind: type[K], hparams: Mapping[str, Any]) -> K:
    """A model's hyperparameters out of all of them.

    Raises:
        ConfigError: Everything that is wrong with them.
    """
    options = parse_section(kind, hparams, section="hyperparameters", closed=False)
    if options.model_size is None and options.pretrained is None:
        message = "both it and pretrained are null, so that the model has no size."
        raise config_error("hyperparameters.model_size", None, message, "model_size: tiny")
    return options


def size(width: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    """A published size in the words of a Hugging Face configuration."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        **more,
    }


def base_config(
    options: ClassifierOptions,
    classes: Sequence[str],
    *,
    model_type: str,
    sizes: Mapping[str, int] | None,
    only_sizes: bool = False,
) -> dict[str, Any]:
    """The configuration of a classifier, its labels named.

    Args:
        options: What to build.
        classes: Names of the classes of the data, by label.
        model_type: By Hugging Face's name.
        sizes: Of ``model_size``; None: those of the checkpoint.
        only_sizes: Read no checkpoint where ``sizes`` says enough.

    Raises:
        ConfigError: A checkpoint that cannot be read or is of another model or size, or more classes than labels.
    """
    config: dict[str, Any] = dict(sizes or {})
    source = options.pretrained
    if source is not None and not (only_sizes and sizes):
        try:
            config, _ = transformers.PretrainedConfig.get_config_dict(source)
            if (
                "model_type" not in config
            ):  # transformers makes an empty configuration of a folder without one
                raise OSError("there is no config.json with a model_type")
        except Exception as error:  # What it raises differs by what is missing, broken or out of reach.
            raise unloadable(source, error) from error
        if (found := config["model_type"]) != model_type:
            fix = f"a checkpoint of a {model_type}, or the trial of a {found}"
            raise config_error(KEY, source, f"is a checkpoint of {found!r}, not of {model_type!r}.", fix)
        default = vars(transformers.AutoConfig.for_model(model_type))
        there = {name: config.get(name, default.get(name)) for name in sizes or ()}
        if sizes and there != dict(sizes):
            message = f"is of another size than hyperparameters.model_size: {there}, not {dict(sizes)}."
            fix = "the model_size of the checkpoint; or model_size: null, which takes it"
            raise config_error(KEY, source, message, fix)
    num_labels = options.num_labels or len(classes)
    if num_labels < len(classes):
        message = f"the data has {len(classes)} classes, so labels from {num_labels} on have no output."
        fix = f"num_labels: {len(classes)}; or null, which takes the classes of the data"
        raise config_error("hyperparameters.num_labels", num_labels, message, fix)
    names = {label: f"LABEL_{label}" for label in range(num_labels)} | dict(enumerate(classes))
    config |= {
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
        "hidden_dropout_prob": options.dropout,
        "attention_probs_dropout_prob": options.dropout,
    }
    config.pop("num_labels", None)  # the names say it
    return config


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
    source, wrong = options.pretrained, []
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
        raise config_error(KEY, source, f"{len(wrong)} tensors do not fit: {shortened(wrong)}.", fix)
    if options.activation_checkpointing:
        enable_activation_checkpointing(model)
    trained: nn.Module = model.train()
    return trained
