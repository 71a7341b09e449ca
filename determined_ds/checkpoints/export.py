"""``det-ds checkpoint export`` and ``import``: to other programs and from them; one process, no engine, no GPU.

export   checkpoint, verified -> its weights -> their names out there -> files aside -> in the place of OUT
import   files of safetensors, linked -> index.json over their bytes -> searcher.source_checkpoint_uuid: FOLDER

A rank that starts from an import reads the slices that it holds, and no process ever holds all.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import split_state_dict_into_shards_factory

from determined_ds.checkpoints.files import (
    PARTIAL,
    STATE,
    TrialState,
    files_of,
    fingerprint,
    read_object,
    sizes_in,
    sync_to_disk,
    write_manifest,
)
from determined_ds.checkpoints.index import (
    IMPORTED,
    WEIGHT,
    EngineIndex,
    Piece,
    StoredState,
    StoredTensor,
    write_index,
)
from determined_ds.checkpoints.reader import DTYPES, Weight, open_engine, weights_of
from determined_ds.checkpoints.safe_load import some_of
from determined_ds.checkpoints.shard_file import ITEM_BYTES, LENGTH_BYTES, Streamed, write_shard
from determined_ds.errors import NOT_GIVEN, CheckpointError, ConfigError, DeterminedDSError, Problem
from determined_ds.rundir.run_dir import existing
from determined_ds.trial.returned import method_of

HUGGINGFACE, TORCH = "huggingface", "torch"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_BYTES = 5 * 10**9  # most of one file of safetensors, as save_pretrained's; a larger tensor has its own
MADE = ".determined_ds.json"  # in a folder that was made here: the names of its files
# What a folder of Hugging Face's holds beside the weights, and is read without running code of it; and what of that
# belongs to its own weights, or was written by its Trainer for the training alone.
BESIDE = ("*.json", "*.txt", "*.jinja", "*.model")
NOT_BESIDE = ("*.index.json", "trainer_state.json", "determined_ds.json")


def refused(option: str, value: Any, message: str, fix: str) -> ConfigError:
    """The error of an option that cannot be met."""
    value = value if value is NOT_GIVEN else str(value)
    return ConfigError(Problem(key=option, value=value, message=message, fix=fix, code="export"))


def export(
    path: Path,
    out: Path,
    *,
    to: str,
    engine: int,
    dtype: str | None,
    merge_lora: bool,
    config: Path | None,
    context_dir: Path,
    force: bool,
) -> dict[str, Any]:
    """Export a checkpoint.

    Args:
        path: The checkpoint's folder.
        out: The folder, or for torch the file, to make.
        to: ``huggingface``, ``safetensors`` or ``torch``.
        engine: Which of the trial's, counted from 0.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None: as the model computes.
        merge_lora: Whether adapters are merged into the weights.
        config: A folder with config.json and tokenizer of the model; None: those of the trial.
        context_dir: With the code of the trial.
        force: Whether an earlier export is replaced.

    Returns:
        ``out``, ``tensors``, ``bytes`` (of them), and ``notes``: what the user should know.

    Raises:
        ConfigError: the request cannot be met.
        CheckpointError: the checkpoint is damaged, or lacks what was requested.
    """
    path, out, notes = path.absolute(), out.resolve(), []  # code of the trial runs in another folder
    if merge_lora and to != HUGGINGFACE:
        raise refused("--merge-lora", NOT_GIVEN, f"is for --to {HUGGINGFACE}", "leave it out")
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(replacing(out, path, force=force, is_file=to == TORCH))
        stored = open_engine(path, engine)
        of_engine = partial(weights_of, path, stored)
        weights = of_engine(dtype=None if dtype is None else TYPES[dtype])
        index, model, adapter_config = stored.index, None, None
        if to == HUGGINGFACE:
            config = config and config.absolute()
            model = stack.enter_context(_pretrained(path, index, config, context_dir))
            if model.adapted is None and merge_lora:
                message = "the checkpoint's model has no adapters of peft"
                raise refused("--merge-lora", NOT_GIVEN, message, "leave it out")
            if model.adapted is None:
                weights = _named(model.model, weights, {**index.aliases, **index.common})
            elif merge_lora:
                # As peft merges: in the type of the weights; with --dtype in the most exact one that there is.
                exact = weights if dtype is None else of_engine(dtype=torch.float32)
                weights = _named(model.model, _merged(model, weights, exact), {})
            else:
                weights, adapter_config = _adapter(model, weights)
                if not adapter_config.base_model_name_or_path:
                    notes.append(
                        "the adapter's base model began with random weights, and has no name: only --merge-lora "
                        "exports it, too"
                    )
        num_bytes = sum(each.num_bytes for each in weights.values())
        if to == TORCH:
            state = {name: each.whole() for name, each in weights.items()}
            torch.save({**state, **{alias: state[name] for alias, name in index.aliases.items()}}, made)
        else:
            _write_folder(made, weights, is_adapter=adapter_config is not None)
        if model is not None:
            _write_beside(made, model, weights, adapter_config)
    return {"out": str(out), "tensors": len(weights), "bytes": num_bytes, "notes": notes}


def _write_folder(made: Path, weights: Mapping[str, Weight], *, is_adapter: bool) -> None:
    """Write files of safetensors, with an index where there are several."""
    made.mkdir()
    stem = "adapter_model" if is_adapter else "model"
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda each: each.num_bytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=2**63 if is_adapter else SHARD_BYTES,  # peft reads one file
    )
    for file, names in split.filename_to_tensors.items():
        streams = {
            name: Streamed(DTYPES[weights[name].dtype], weights[name].shape, weights[name].chunks)
            for name in names
        }
        write_shard(made / file, streams, sealed=False)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (made / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# ------------------------------------------------------------------------------------------- names of transformers


@dataclass(frozen=True, kw_only=True)
class _Pretrained:
    """The model of transformers that a checkpoint is of; without values, on the meta device."""

    model: Any  # of a class of transformers itself
    adapted: Any  # as the trial builds it, a peft.PeftModel; None: it has no adapters
    stored: Mapping[int, str]  # id of a tensor that the trial builds -> its name in the checkpoint
    trial: Any  # which writes more files, such as a tokenizer; None: they are in a folder
    files: list[Path]  # these


@contextlib.contextmanager
def _pretrained(
    path: Path, index: EngineIndex, folder: Path | None, context_dir: Path
) -> Iterator[_Pretrained]:
    """That of a folder's config.json, or of the checkpoint's trial, whose code can be called inside."""
    import transformers

    from determined_ds.train.bare_trial import trial_of
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    trial: Any = None
    kind, adapted, stored, files = None, None, dict[int, str](), list[Path]()
    folder = folder or next((file.parent for file in path.glob("checkpoint-*/config.json")), None)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            name = str(folder)
            with _explained(f"{folder} has no config.json that transformers reads"):
                config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            files = [each for each in folder.iterdir() if any(map(each.match, BESIDE))]
            files = [each for each in files if not any(map(each.match, NOT_BESIDE))]
        else:
            try:
                trial = stack.enter_context(trial_of(path, context_dir))
            except CheckpointError as error:  # it was written by a script, or does not say by what
                raise _unknown(str(error).splitlines()[0]) from None
            name, config = type(trial).__name__, trial.huggingface_config()
        if config is None:
            if isinstance(trial, PipelineTrial):
                raise _unknown(f"{name} builds a pipeline, and has no huggingface_config")
            with _explained(f"{name}.build_model fails on the meta device"):
                built = returned.model(trial, trial.build_model())
            tensors, modules = built.state_dict(keep_vars=True), list(built.modules())
            stored = {id(tensor): index.aliases.get(name, name) for name, tensor in tensors.items()}
            models = [each for each in modules if isinstance(each, transformers.PreTrainedModel)]
            if not models:
                raise _unknown(f"{name} trains a {type(built).__name__}, without a model of transformers")
            adapted = next((each for each in modules if hasattr(each, "get_base_model")), None)
            # Of a trial's own class its nearest parent in transformers, which users of an export have.
            parents = type(models[0]).__mro__
            kind = next(each for each in parents if each.__module__.startswith("transformers."))
            config = models[0].config
        names = getattr(config, "architectures", None) or []
        kind = kind or next((found for each in names if (found := getattr(transformers, each, None))), None)
        if kind is None:
            raise _unknown(f"the configuration of {name} names no architectures of transformers")
        config = copy.deepcopy(config)
        config.architectures = [kind.__name__]
        with _explained(f"{kind.__name__} cannot be built from the configuration of {name}"):
            model = kind(config)
        yield _Pretrained(model=model, adapted=adapted, stored=stored, trial=trial, files=files)


def _write_beside(
    made: Path, of: _Pretrained, weights: Mapping[str, Weight], adapter_config: Any | None
) -> None:
    """Write what from_pretrained, of transformers or of peft, goes by, and what else belongs to a model."""
    for file in of.files:
        shutil.copyfile(file, made / file.name)
    if of.trial is not None:
        try:
            of.trial.export_files(made)
        except Exception as error:  # code of the trial
            method = method_of(of.trial, "export_files")
            raise CheckpointError(f"{method} failed: {type(error).__name__}: {error}") from error
    if adapter_config is not None:
        adapter_config.save_pretrained(made)
        return
    floating = [each.dtype for each in weights.values() if each.dtype.is_floating_point]
    of.model.config.dtype = max(floating, key=floating.count) if floating else None
    of.model.config.save_pretrained(made)
    if of.model.can_generate() and not (made / "generation_config.json").is_file():
        of.model.generation_config.save_pretrained(made)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """In here models are built on the meta device, and what transformers or a trial raises becomes a message."""
    from determined_ds.train.group.process_group import only_errors

    try:
        with torch.device("meta"), only_errors("transformers"):
            yield
    except DeterminedDSError:
        raise
    except Exception as error:
        raise _unknown(f"{what}: {error}") from error


def _unknown(message: str) -> ConfigError:
    fix = "--config FOLDER, with the config.json of the Hugging Face model; or --to safetensors"
    return refused("--to", HUGGINGFACE, message, fix)


def _named(model: Any, weights: Mapping[str, Weight], others: Mapping[str, str]) -> dict[str, Weight]:
    """The weights by the names of a model on the meta device: each of its tensors must be there, and no other.

    Names may have one prefix more than those of the model; ``others`` has more names of the weights.
    """
    tensors = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # of those that are tied
    stored = {**weights, **{other: weights[name] for other, name in others.items()}}
    starts = ((name, at) for name in stored for at in (0, *(dot.end() for dot in re.finditer(r"\.", name))))
    prefixes = Counter(name[:at] for name, at in starts if name[at:] in tensors)
    prefix = max(prefixes, key=lambda each: prefixes[each], default="")
    found, taken, wrong = dict[str, Weight](), set[Weight](), []
    for name, tensor in tensors.items():
        if (weight := stored.get(prefix + name)) is None:
            continue
        first, shape = first_names[id(tensor)], tuple(tensor.shape)
        same = found.setdefault(first, weight)
        taken.add(weight)
        if weight.shape != shape:
            wrong.append(f"{name} has shape {weight.shape} in the checkpoint, and {shape} in it")
        elif same != weight and not torch.equal(same.whole(), weight.whole()):
            raise CheckpointError(
                f"the checkpoint has two tensors for {first}, which the Hugging Face model ties, and they differ: one "
                f"is {prefix}{name}\n  fix: a configuration with tie_word_embeddings: false, by --config FOLDER; or "
                "--to safetensors"
            )
    lacking = [name for name in tensors if name in first_names.values() and name not in found]
    wrong += [f"{name} {tuple(tensors[name].shape)} is not in the checkpoint" for name in lacking]
    wrong += [f"{name} {each.shape} is not in it" for name, each in weights.items() if each not in taken]
    if wrong:
        message = f"the checkpoint's tensors are not those of {type(model).__name__}: {some_of(wrong)}"
        fix = "--to safetensors keeps the names; or give the trial a weight_names(model) with those of Hugging Face"
        raise refused("--to", HUGGINGFACE, message, fix)
    return found


# ------------------------------------------------------------------------------------------- adapters of peft


def _of(
    model: _Pretrained, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Weight]
) -> dict[str, Weight]:
    """The weights of tensors that the trial builds, by their names here."""
    names = {name: model.stored.get(id(tensor), "") for name, tensor in tensors.items()}
    if lacking := [name for name, stored in names.items() if stored not in weights]:
        message = f"the checkpoint lacks tensors of the model that the trial builds: {some_of(lacking)}"
        raise refused("--to", HUGGINGFACE, message, "--context-dir with the code that trained it")
    return {name: weights[stored] for name, stored in names.items()}


def _merged(
    model: _Pretrained, weights: Mapping[str, Weight], exact: Mapping[str, Weight]
) -> dict[str, Weight]:
    """The weights by the names of the base model, each merged by peft when it is written."""
    kinds = [str(each.peft_type.value) for each in model.adapted.peft_config.values()]
    if kinds != ["LORA"]:
        message = f"the model has adapters of {', '.join(kinds)}, and one LoRA alone is merged"
        raise refused("--merge-lora", NOT_GIVEN, message, "export without --merge-lora")
    from peft.tuners.tuners_utils import BaseTunerLayer

    def merge(layer: Any, name: str, parts: Mapping[str, Weight]) -> Iterator[torch.Tensor]:
        own = copy.deepcopy(layer)
        own.load_state_dict({each: weight.whole() for each, weight in parts.items()}, assign=True)
        own.merge()
        yield own.get_base_layer().state_dict()[name]

    found = dict(weights)
    layers: list[Any] = [each for each in model.adapted.modules() if isinstance(each, BaseTunerLayer)]
    for layer in layers:
        parts, unmerged = _of(model, layer.state_dict(keep_vars=True), exact), copy.deepcopy(layer)
        for name, tensor in layer.get_base_layer().state_dict(keep_vars=True).items():
            stored = model.stored[id(tensor)]
            found[stored] = replace(found[stored], read=partial(merge, unmerged, name, parts))
    with _explained("peft cannot merge the adapters"):
        base = (
            model.adapted.merge_and_unload()
        )  # on the meta device: it says which tensor has which name then
    return _of(model, base.state_dict(keep_vars=True), found)


def _adapter(model: _Pretrained, weights: Mapping[str, Weight]) -> tuple[dict[str, Weight], Any]:
    """The adapter's tensors by the names that peft writes, and the configuration that peft reads them with."""
    import peft

    tensors = model.adapted.state_dict(keep_vars=True)
    kept = peft.get_peft_model_state_dict(model.adapted, state_dict=tensors, save_embedding_layers=False)
    config = copy.deepcopy(model.adapted.active_peft_config)
    config.inference_mode = True
    config.base_model_name_or_path = config.base_model_name_or_path or model.model.config.name_or_path
    return _of(model, kept, weights), config


# ------------------------------------------------------------------------------------------- the target


@contextlib.contextmanager
def replacing(out: Path, source: Path, *, force: bool, is_file: bool = False) -> Iterator[Path]:
    """A name aside, for what takes the place of ``out`` when all of it is written; nothing is left where that fails.

    With ``force``, a file is replaced; and, in a folder, what was made here: what else is in it stays.

    Raises:
        ConfigError: the target holds the source or lies in it, may not be replaced, or cannot be written.
    """
    source, made_before = source.resolve(), read_object(out / MADE).get("files")
    aside = existing(out.parent) / f".{out.name}.{os.getpid()}{PARTIAL}"
    exists = out.is_file() or (out.is_dir() and any(out.iterdir()))
    kind = "a file" if is_file else "a folder"
    not_ours = f"was not made by det-ds checkpoint export or import (it has no {MADE}), and is not replaced"
    reasons = {
        f"lies in {source}": out.is_relative_to(source),
        f"holds {source}": source.is_relative_to(out),
        f"is not {kind}, and {kind} is to be made": out.exists() and out.is_dir() == is_file,
        "exists already (--force replaces what an export or an import made)": exists and not force,
        not_ours: exists and not is_file and not isinstance(made_before, list),
        f"{aside.parent} cannot be written to": not os.access(aside.parent, os.W_OK | os.X_OK),
    }
    if message := next((message for message, applies in reasons.items() if applies), ""):
        raise refused("--output", out, message, "name another")
    try:
        yield aside
        names = list(sizes_in(aside))
        if not is_file:
            (aside / MADE).write_text(json.dumps({"files": names}, indent=1) + "\n")
        sync_to_disk(aside)
        out.parent.mkdir(parents=True, exist_ok=True)
        if made_before is None:
            aside.replace(out)
            return
        for name in map(str, made_before):
            if (out / name).resolve().is_relative_to(out):
                (out / name).unlink(missing_ok=True)
        for name in (*names, MADE):  # the list last: until then, it can be done again
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(out / name)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- import


FIX = (
    "give a file of safetensors, or a folder that save_pretrained has written. Of a state_dict: "
    "safetensors.torch.save_file(torch.load(FILE), OUT); of DeepSpeed's files: "
    "python -m deepspeed.utils.zero_to_fp32 --safe_serialization DIR OUT"
)


def import_weights(
    given: Path, out: Path, *, prefix: str, skip: Sequence[str], force: bool
) -> dict[str, Any]:
    """Make a checkpoint of weights.

    Args:
        given: A file of safetensors, or a folder of them.
        out: The checkpoint's folder, to make.
        prefix: To put before every name.
        skip: Shell patterns of names to leave out.
        force: Whether an earlier import at ``out`` is replaced.

    Returns:
        ``tensors`` and their ``bytes``; ``linked``: whether its files take no room of their own.

    Raises:
        ConfigError: these are not such files, or ``out`` exists.
    """
    files = _files_at(given)
    tensors: dict[str, StoredTensor] = {}
    linked = True
    with replacing(out.resolve(), given, force=force) as made:
        folder = made / "model0"
        folder.mkdir(parents=True)
        for file in files:
            for name, tensor in _tensors_in(file):
                if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
                    continue
                if prefix + name in tensors:
                    message = f"{name} is in several files"
                    raise refused("WEIGHTS", file.name, message, "give the folder of one model")
                tensors[prefix + name] = tensor
            try:
                os.link(file.resolve(), folder / file.name)  # of a link what it means
            except OSError:  # another disk, another's file, or a file system without links
                linked = False
                shutil.copyfile(file, folder / file.name)
        if not tensors:
            raise refused("WEIGHTS", given, "holds no tensors that are not skipped", "skip fewer")
        write_index(folder, EngineIndex(tensors=tensors))
        (made / STATE).write_text(json.dumps(asdict(TrialState())) + "\n")
        prints = {name: fingerprint(made / name) for name in files_of(made)}
        write_manifest(made, prints, {"steps_completed": 0, "framework": "", "format": "pickle"})
    num_bytes = sum(each.states[WEIGHT].num_bytes for each in tensors.values())
    return {"tensors": len(tensors), "bytes": num_bytes, "linked": linked}


def _files_at(given: Path) -> list[Path]:
    """The files with weights that a path means."""
    files = sorted(given.glob("*.safetensors"))
    if given.is_file() and given.suffix == ".safetensors":
        files = [given]
    if not files:
        raise refused("WEIGHTS", given, "is no file of safetensors, and no folder of such files", FIX)
    for index in given.glob("*.safetensors.index.json"):
        named = set((read_object(index).get("weight_map") or {}).values())
        if missing := sorted(named - {file.name for file in files}):
            raise refused(
                "WEIGHTS", given, f"{missing[0]} is missing, which its index names", "copy it again"
            )
    return files


def _tensors_in(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a file by name, as an index has them; none is read."""
    try:
        # It checks all of the header, and that the bytes of the tensors follow each other to the end of the file.
        with safetensors.safe_open(file, framework="pt") as opened, file.open("rb") as stream:
            at = LENGTH_BYTES + int.from_bytes(stream.read(LENGTH_BYTES), "little")
            kinds = {name: opened.get_slice(name) for name in opened.offset_keys()}
            for name, kind in kinds.items():
                shape, dtype = tuple(kind.get_shape()), kind.get_dtype()
                if dtype not in ITEM_BYTES:
                    message = f"holds numbers of the type {dtype}, which no engine trains"
                    raise refused("WEIGHTS", file, message, "convert it, or save the model without it")
                piece = Piece(file=file.name, offset=at, start=0, length=math.prod(shape))
                states = {WEIGHT: StoredState(dtype=dtype, pieces=[piece])}
                yield name, StoredTensor(shape=shape, kind=IMPORTED, states=states)
                at += piece.length * ITEM_BYTES[dtype]
    except (safetensors.SafetensorError, ValueError) as error:
        fix = "copy it again; an interrupted download is too short"
        raise refused("WEIGHTS", file, f"is not a whole file of safetensors: {error}", fix) from None
