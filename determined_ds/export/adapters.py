"""LoRA adapters: merged into the weights by peft, one module at a time, or written as peft reads them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.export.outgoing import CHUNK, Outgoing

BASE, LAYER = "base_model.model.", "base_layer."
# A module that is trained whole has its first weights beside those that were trained.
ORIGINAL, SAVED = ".original_module.", re.compile(r"\.modules_to_save\.[^.]+\.")
Weights = Mapping[str, Outgoing]


def merged(
    adapted: Any, prefix: str, exact: Weights, wanted: Weights, names: Iterable[str]
) -> dict[str, Outgoing]:
    """The weights without adapters, by the names of the base model, those that have one with it merged in.

    Args:
        adapted: A ``peft.PeftModel`` on the meta device.
        prefix: Of its names in the checkpoint.
        exact: Name in the checkpoint -> tensor, in the type to merge in.
        wanted: The same, in the type to write.
        names: The first name of each.

    Returns:
        Name in the base model -> tensor.
    """
    found: dict[str, Outgoing] = {}
    inside: set[str] = set()
    for path, module in adapted.named_modules():
        if not hasattr(module, "get_base_layer") or not hasattr(module, "merge"):
            continue
        of_module = {name: f"{prefix}{path}.{name}" for name in module.state_dict()}
        inside |= set(of_module.values())
        tensors = {own: exact[there] for own, there in of_module.items()}
        for name in module.get_base_layer().state_dict():
            written = wanted[of_module[LAYER + name]]
            found[in_base(f"{path}.{name}")] = Outgoing(
                shape=written.shape, dtype=written.dtype, chunks=_merging(module, name, tensors)
            )
    kept = {name: wanted[name] for name in names if name not in inside and ORIGINAL not in name}
    return {**found, **{in_base(name.removeprefix(prefix)): each for name, each in kept.items()}}


def _merging(module: Any, name: str, tensors: Weights) -> Callable[[], Iterator[torch.Tensor]]:
    """Merges a module when its weight is written."""

    def chunks() -> Iterator[torch.Tensor]:
        own = copy.deepcopy(module)
        own.load_state_dict({each: tensor.whole() for each, tensor in tensors.items()}, assign=True)
        own.merge()
        yield from own.get_base_layer().state_dict()[name].reshape(-1).split(CHUNK)

    return chunks


def in_base(name: str) -> str:
    """A name of a peft model in its base model."""
    return SAVED.sub(".", name.removeprefix(BASE).replace(f".{LAYER}", "."))


def adapter_of(adapted: Any, prefix: str, weights: Weights) -> dict[str, Outgoing]:
    """The adapter's tensors by the names that peft writes.

    Args:
        adapted: A ``peft.PeftModel`` on the meta device.
        prefix: Of its names in the checkpoint.
        weights: Name in the checkpoint -> tensor.
    """
    import peft

    own = {
        name: tensor
        for name, tensor in adapted.state_dict(keep_vars=True).items()
        if prefix + name in weights
    }
    names = {id(tensor): prefix + name for name, tensor in own.items()}
    kept = peft.get_peft_model_state_dict(adapted, state_dict=own, save_embedding_layers=False)
    return {name: weights[names[id(tensor)]] for name, tensor in kept.items()}


def write_adapter_config(adapted: Any, folder: Path) -> None:
    """Write adapter_config.json."""
    config = copy.deepcopy(adapted.active_peft_config)
    config.inference_mode = True
    config.base_model_name_or_path = (
        config.base_model_name_or_path or adapted.get_base_model().config.name_or_path
    )
    config.save_pretrained(folder)


def only_lora(adapted: Any) -> None:
    """Refuse adapters that cannot be merged.

    Raises:
        ConfigError: they are of another kind, or several.
    """
    if len(adapted.peft_config) != 1 or str(adapted.active_peft_config.peft_type.value) != "LORA":
        kinds = ", ".join(str(each.peft_type.value) for each in adapted.peft_config.values())
        raise ConfigError(
            Problem(
                key="--merge-lora",
                message=f"the model has adapters of {kinds}, and one LoRA alone is merged",
                fix="export without --merge-lora",
                code="lora",
            )
        )
