"""An export that ``from_pretrained`` reads: weights by Hugging Face's names, config.json, the tokenizer.

With adapters that are not merged, what ``peft.PeftModel.from_pretrained`` reads.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError
from determined_ds.export.adapters import adapter_of, in_base, merged, only_lora, write_adapter_config
from determined_ds.export.matching import Stored, match
from determined_ds.export.model_of_trial import TrainedModel, model_of_folder, model_of_trial
from determined_ds.export.outgoing import Outgoing, first_difference, weights_of
from determined_ds.export.tensor_files import write_file, write_safetensors
from determined_ds.export.verified_engine import VerifiedEngine
from determined_ds.export.wanted import TYPES, ExportPlan, ExportRequest, refused
from determined_ds.trial.author import method_of

ADAPTER = "adapter_model.safetensors"
# What a folder of Hugging Face's holds beside the weights, and is read without running code of it.
BESIDE = ("*.json", "*.txt", "*.jinja", "*.model")
# Of a checkpoint of its Trainer, what is for the training alone.
TRAINERS_OWN = ("trainer_state.json", "determined_ds.json")
WEIGHTS_INDEX = "*.index.json"
Averages = Mapping[str, torch.Tensor]


@contextlib.contextmanager
def plan_huggingface(
    request: ExportRequest, source: VerifiedEngine, averages: Averages
) -> Iterator[ExportPlan]:
    """What will be written; inside, code of the trial can be called.

    Raises:
        ConfigError: the names are not those of a Hugging Face model.
        CheckpointError: weights differ that the model ties.
    """
    of_transformers = next(request.path.glob("checkpoint-*/config.json"), None)
    if request.config is None and of_transformers is not None:  # written by its Trainer
        request = replace(request, config=of_transformers.parent)
    if request.config is not None:
        yield _plan(request, source, averages, model_of_folder(request.config))
        return
    with model_of_trial(request.path, request.context_dir, own_code=request.own_code) as model:
        yield _plan(request, source, averages, model)


def _plan(
    request: ExportRequest, source: VerifiedEngine, averages: Averages, model: TrainedModel
) -> ExportPlan:
    dtype = None if request.dtype is None else TYPES[request.dtype]
    weights = _by_any_name(source, weights_of(source, dtype, averages))
    if model.adapted is None:
        if request.merge_lora:
            message = "the checkpoint's model has no adapters of peft"
            raise refused("--merge-lora", None, message, "leave it out")
        tensors = _matched(model, source, {name: weights[name] for name in source.stored.index.tensors})
        return _plan_model(request, model, tensors)
    if not request.merge_lora:
        tensors = adapter_of(model.adapted, model.prefix, weights)
        return ExportPlan(
            tensors=tensors,
            write=partial(_write_adapter, request=request, model=model, tensors=tensors),
            notes=_about_base(model),
        )
    only_lora(model.adapted)
    # As peft merges: in the type of the weights; with --dtype in the most exact one that there is.
    exact = weights if dtype is None else _by_any_name(source, weights_of(source, torch.float32, averages))
    index = source.stored.index
    found = merged(model.adapted, model.prefix, exact, weights, list(index.tensors))
    others = {
        in_base(alias): in_base(name) for alias, name in (*index.aliases.items(), *index.common.items())
    }
    return _plan_model(request, model, _matched(model, source, found, others))


def _plan_model(request: ExportRequest, model: TrainedModel, tensors: Mapping[str, Outgoing]) -> ExportPlan:
    return ExportPlan(
        tensors=tensors, write=partial(_write_model, request=request, model=model, tensors=tensors)
    )


def _by_any_name(source: VerifiedEngine, weights: Mapping[str, Outgoing]) -> dict[str, Outgoing]:
    aliases = source.stored.index.aliases.items()
    return {**weights, **{alias: weights[name] for alias, name in aliases}}


def _matched(
    model: TrainedModel,
    source: VerifiedEngine,
    weights: Mapping[str, Outgoing],
    others: Mapping[str, str] | None = None,
) -> dict[str, Outgoing]:
    """The weights by the names of a Hugging Face model."""
    index = source.stored.index
    others = {**index.aliases, **index.common} if others is None else others
    shapes = {name: each.shape for name, each in weights.items()}
    found = match(model.expected, Stored(shapes=shapes, others=others), kind=model.kind.__name__)
    for name, copies in found.copies.items():
        for each in copies:
            _check_tied(source, name, found.names[name], each, weights)
    return {name: weights[own] for name, own in found.names.items()}


def _check_tied(
    source: VerifiedEngine, name: str, one: str, other: str, weights: Mapping[str, Outgoing]
) -> None:
    if (place := first_difference(weights[one], weights[other])) is not None:
        raise CheckpointError(
            f"checkpoint {source.path} has two tensors for {name}, which the Hugging Face model ties, and they "
            f"differ from element {place} on: {one} and {other}\n  fix: a configuration with tie_word_embeddings: "
            "false, by --config FOLDER; or --to safetensors"
        )


# ------------------------------------------------------------------------------------------- written


def _write_model(
    out: Path,
    advance: Callable[[int], None],
    *,
    request: ExportRequest,
    model: TrainedModel,
    tensors: Mapping[str, Outgoing],
) -> None:
    out.mkdir()
    write_safetensors(out, tensors, request.shard_bytes, advance)
    floating = [each.dtype for each in tensors.values() if each.dtype.is_floating_point]
    model.config.dtype = max(floating, key=floating.count) if floating else None
    _write_files(out, request, model)
    model.config.save_pretrained(out)
    if model.model.can_generate() and not (out / "generation_config.json").is_file():
        model.model.generation_config.save_pretrained(out)


def _write_adapter(
    out: Path,
    advance: Callable[[int], None],
    *,
    request: ExportRequest,
    model: TrainedModel,
    tensors: Mapping[str, Outgoing],
) -> None:
    out.mkdir()
    write_file(out / ADAPTER, tensors, advance)
    _write_files(out, request, model)
    write_adapter_config(model.adapted, out)


def _write_files(out: Path, request: ExportRequest, model: TrainedModel) -> None:
    """The tokenizer and what else belongs to a model."""
    if model.trial is not None:
        try:
            model.trial.export_files(out)
        except Exception as error:  # code of the trial
            method = method_of(model.trial, "export_files")
            raise CheckpointError(f"{method} failed: {type(error).__name__}: {error}") from error
    if request.config is None:
        return
    for pattern in BESIDE:
        for file in request.config.glob(pattern):
            if not file.match(WEIGHTS_INDEX) and file.name not in TRAINERS_OWN:
                shutil.copyfile(file, out / file.name)


def _about_base(model: TrainedModel) -> tuple[str, ...]:
    config: Any = model.adapted.get_base_model().config
    if model.adapted.active_peft_config.base_model_name_or_path or config.name_or_path:
        return ()
    return (
        "the adapter's base model began with random weights, and has no name: only --merge-lora exports it, too",
    )
