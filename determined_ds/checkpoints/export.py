"""``det-ds checkpoint export``: a checkpoint as files of other programs; one process, no engine, no GPU.

checkpoint, verified -> its weights -> their names out there -> files aside -> in the place of OUT
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from determined_ds.checkpoints.files import PARTIAL, damage_of, sync_to_disk, warn_if_unverified
from determined_ds.checkpoints.weights import Weight, open_engine, weights_of, write_safetensors, write_torch
from determined_ds.errors import CheckpointError, ConfigError, DeterminedDSError, Problem
from determined_ds.memory.units import format_bytes
from determined_ds.rundir.limits import room_in
from determined_ds.rundir.run_dir import existing
from determined_ds.train.load_model import trial_of
from determined_ds.train.upstream import only_errors
from determined_ds.trial.author import method_of

logger = logging.getLogger("determined_ds")
HUGGINGFACE, SAFETENSORS, TORCH = FORMATS = ("huggingface", "safetensors", "torch")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUM_SHOWN = 5
SHARD_BYTES = 5 * 10**9  # most of one file of safetensors, as save_pretrained's; a larger tensor has its own
OTHER_BYTES = 2**20  # headers, indexes and small files
MADE = ".determined_ds.json"  # in a folder that was made here: the names of its files
# What a folder of Hugging Face's holds beside the weights, and is read without running code of it; and of these what
# its Trainer writes for the training alone.
BESIDE, TRAINERS_OWN = ("*.json", "*.txt", "*.jinja", "*.model"), ("trainer_state.json", "determined_ds.json")
BASE, LAYER, ORIGINAL = "base_model.model.", "base_layer.", ".original_module."  # parts of peft's names
SAVED = re.compile(r"\.modules_to_save\.[^.]+\.")
# (what begins, its bytes) -> within it, called with the bytes that are done.
Stage = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What to export."""

    path: Path  # the checkpoint's folder
    to: str  # one of FORMATS
    out: Path  # the folder, or with torch the file, to make
    engine: int = 0  # which of the trial's
    dtype: str | None = None  # a key of TYPES; None: as the model computes
    average: str | None = None  # the name of an EMA whose averages are taken; None: the weights themselves
    merge_lora: bool = False  # whether adapters are merged into the weights
    config: Path | None = (
        None  # a folder with config.json and tokenizer of the model; None: those of the trial
    )
    context_dir: Path = Path()  # with the code of the trial
    force: bool = False  # whether an earlier export is replaced


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    out: Path
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()  # what the user should know


@contextlib.contextmanager
def unseen(said: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A :data:`Stage` that shows nothing."""
    yield lambda count: None


def refused(option: str, value: Any, message: str, fix: str) -> ConfigError:
    """The error of an option that cannot be met."""
    given = {} if value is None else {"value": str(value)}
    return ConfigError(Problem(key=option, message=message, fix=fix, code="export", **given))


def export(request: ExportRequest, stage: Stage = unseen) -> Exported:
    """Export a checkpoint; ``stage`` shows how far it is.

    Raises:
        ConfigError: the request cannot be met.
        CheckpointError: the checkpoint is damaged, or lacks what was requested.
    """
    path, out, notes = request.path.absolute(), request.out.resolve(), []
    config = None if request.config is None else request.config.absolute()
    request = replace(request, path=path, config=config)  # code of the trial runs in another folder
    check_target(path, out, force=request.force, is_file=request.to == TORCH)
    if request.merge_lora and request.to != HUGGINGFACE:
        raise refused("--merge-lora", None, f"is for --to {HUGGINGFACE}", "leave it out")
    with stage("verify", sum(each.stat().st_size for each in path.rglob("*") if each.is_file())) as read:
        if damage := damage_of(path, read=read):
            raise CheckpointError(f"checkpoint {path} is damaged: {damage}\n  fix: export another checkpoint")
    warn_if_unverified(path)
    with contextlib.ExitStack() as of_trial:
        engine = open_engine(path, request.engine)
        dtype = None if request.dtype is None else TYPES[request.dtype]
        of_engine = partial(weights_of, path, engine, average=request.average)
        weights, model, stem = of_engine(dtype=dtype), None, "model"
        if request.to == HUGGINGFACE:
            model = of_trial.enter_context(_pretrained(request))
            others = {**engine.index.aliases, **engine.index.common}
            if model.adapted is not None and not request.merge_lora:
                weights, stem = (
                    _adapter(model, weights, engine.index.aliases),
                    "adapter_model",
                )  # peft reads one file
                if not model.adapter_config.base_model_name_or_path:
                    notes.append(
                        "the adapter's base model began with random weights, and has no name: only --merge-lora "
                        "exports it, too"
                    )
            else:
                if request.merge_lora:
                    # As peft merges: in the type of the weights; with --dtype in the most exact one that there is.
                    exact = weights if dtype is None else of_engine(dtype=torch.float32)
                    weights = _merged(model, weights, exact, engine.index.aliases)
                    others = {_in_base(alias): _in_base(name) for alias, name in others.items()}
                weights = _named(model.model, weights, others)
        num_bytes = sum(each.num_bytes for each in weights.values())
        check_disk(out, num_bytes)
        with stage("write", num_bytes) as advance, replacing(out) as made:
            if request.to == TORCH:
                write_torch(made, weights, engine.index.aliases, advance)
            else:
                made.mkdir()
                split = split_state_dict_into_shards_factory(
                    dict(weights),
                    get_storage_size=lambda each: each.num_bytes,
                    filename_pattern=stem + "{suffix}.safetensors",
                    max_shard_size=num_bytes + 1 if stem == "adapter_model" else SHARD_BYTES,
                )
                for file, names in split.filename_to_tensors.items():
                    write_safetensors(made / file, {name: weights[name] for name in names}, advance)
                if split.is_sharded:
                    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                    (made / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            if model is not None:
                model.write_beside(made, weights, is_adapter=stem != "model")
    return Exported(out=out, num_tensors=len(weights), num_bytes=num_bytes, notes=tuple(notes))


# ------------------------------------------------------------------------------------------- names of transformers


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The model of transformers that a checkpoint is of; without values, on the meta device."""

    model: Any  # of a class of transformers itself
    adapted: Any = None  # as the trial builds it, a peft.PeftModel; None: it has no adapters
    prefix: str = ""  # of the names of adapted in the trial's model
    trial: Any = None  # which writes more files
    files: tuple[Path, ...] = ()  # more files of the model, to be copied

    @property
    def adapter_config(self) -> Any:
        """That of peft, for users of the adapter."""
        config = copy.deepcopy(self.adapted.active_peft_config)
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or self.model.config.name_or_path
        return config

    def write_beside(self, out: Path, weights: Mapping[str, Weight], *, is_adapter: bool) -> None:
        """Write the configuration, the tokenizer and what else belongs to a model."""
        if self.trial is not None:
            try:
                self.trial.export_files(out)
            except Exception as error:  # code of the trial
                method = method_of(self.trial, "export_files")
                raise CheckpointError(f"{method} failed: {type(error).__name__}: {error}") from error
        for file in self.files:
            shutil.copyfile(file, out / file.name)
        if is_adapter:
            self.adapter_config.save_pretrained(out)
            return
        floating = [each.dtype for each in weights.values() if each.dtype.is_floating_point]
        self.model.config.dtype = max(floating, key=floating.count) if floating else None
        self.model.config.save_pretrained(out)
        if self.model.can_generate() and not (out / "generation_config.json").is_file():
            self.model.generation_config.save_pretrained(out)


@contextlib.contextmanager
def _pretrained(request: ExportRequest) -> Iterator[Pretrained]:
    """That of a folder's config.json, or of the checkpoint's trial, whose code can be called inside."""
    import transformers

    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    def on_meta(config: Any, whose: str, kind: Any = None) -> Any:
        names = getattr(config, "architectures", None) or []
        kind = kind or next((found for name in names if (found := getattr(transformers, name, None))), None)
        if kind is None:
            raise _unknown(f"the configuration of {whose} names no architectures of transformers")
        config = copy.deepcopy(config)
        config.architectures = [kind.__name__]
        try:
            with torch.device("meta"), only_errors("transformers"):
                return kind(config)
        except Exception as error:
            message = f"{kind.__name__} cannot be built from the configuration of {whose}: {error}"
            raise _unknown(message) from error

    by_trainer = next(request.path.glob("checkpoint-*/config.json"), None)
    folder = request.config or (by_trainer and by_trainer.parent)
    if folder is not None:
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever is wrong with the file
            raise _unknown(f"{folder} has no config.json that transformers reads: {error}") from error
        found = [file for pattern in BESIDE for file in folder.glob(pattern)]
        kept = [file for file in found if not file.match("*.index.json") and file.name not in TRAINERS_OWN]
        yield Pretrained(model=on_meta(config, str(folder)), files=tuple(kept))
        return
    with contextlib.ExitStack() as stack:
        try:
            trial = stack.enter_context(trial_of(request.path, request.context_dir))
        except CheckpointError as error:  # it was written by a script, or does not say by what
            raise _unknown(str(error).splitlines()[0]) from None
        name, config = type(trial).__name__, trial.huggingface_config()
        if config is not None:
            yield Pretrained(model=on_meta(config, name), trial=trial)
            return
        if isinstance(trial, PipelineTrial):
            raise _unknown(f"{name} builds a pipeline, and has no huggingface_config")
        try:
            with torch.device("meta"), only_errors("transformers"):
                built: Any = returned.model(trial, trial.build_model())
        except DeterminedDSError:
            raise
        except Exception as error:
            raise _unknown(f"{name}.build_model fails on the meta device: {error}") from error
        for at, module in built.named_modules():
            is_adapted = hasattr(module, "peft_config") and hasattr(module, "get_base_model")
            if is_adapted or isinstance(module, transformers.PreTrainedModel):
                inner = module.get_base_model() if is_adapted else module
                # Of a trial's own class its nearest parent in transformers, which users of an export have.
                kind = next(
                    each for each in type(inner).__mro__ if each.__module__.startswith("transformers.")
                )
                model, adapted = on_meta(inner.config, name, kind), module if is_adapted else None
                yield Pretrained(model=model, adapted=adapted, prefix=f"{at}." if at else "", trial=trial)
                return
        raise _unknown(f"{name} trains a {type(built).__name__}, which holds no model of transformers")


def _unknown(message: str) -> ConfigError:
    fix = "--config FOLDER, with the config.json of the Hugging Face model; or --to safetensors"
    return refused("--to", HUGGINGFACE, message, fix)


def _named(model: Any, weights: Mapping[str, Weight], others: Mapping[str, str]) -> dict[str, Weight]:
    """The weights by the names of a model on the meta device: each of its tensors must be there, and no other.

    Names may have one prefix more than those of the model; ``others`` has more names of the weights.
    """
    tensors, names = model.state_dict(keep_vars=True), dict[int, list[str]]()
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    tied = {every[0]: every for every in names.values()}
    ends = [each for name in (*list(tied)[:1], *list(tied)[-1:]) for each in tied[name]]
    cut = {each.removesuffix(end) for each in (*weights, *others) for end in ends if each.endswith(f".{end}")}
    tries = []
    for prefix in sorted({"", *cut}, key=len):
        wrong, matched = [], {}
        for name, every in tied.items():
            own = [others.get(prefix + each, prefix + each) for each in every]
            matched[name] = found = list(dict.fromkeys(each for each in own if each in weights))
            shape = tuple(tensors[name].shape)
            if not found:
                wrong.append(f"{name} {shape} is not in the checkpoint")
            elif (stored := weights[found[0]].shape) != shape:
                wrong.append(f"{name} has shape {stored} in the checkpoint, and {shape} in it")
        taken = {each for found in matched.values() for each in found}
        wrong += [f"{name} {each.shape} is not in it" for name, each in weights.items() if name not in taken]
        tries.append((wrong, matched))
    wrong, matched = min(tries, key=lambda each: len(each[0]))
    if wrong:
        more = f"; and {len(wrong) - NUM_SHOWN} more" if len(wrong) > NUM_SHOWN else ""
        shown, kind = "; ".join(wrong[:NUM_SHOWN]), type(model).__name__
        message = f"the checkpoint's tensors are not those of {kind}: {shown}{more}"
        fix = "--to safetensors keeps the names; or give the trial a weight_names(model) with those of Hugging Face"
        raise refused("--to", HUGGINGFACE, message, fix)
    for name, (one, *copies) in matched.items():
        for other in copies:
            if not torch.equal(weights[one].whole(), weights[other].whole()):
                raise CheckpointError(
                    f"the checkpoint has two tensors for {name}, which the Hugging Face model ties, and they differ: "
                    f"{one} and {other}\n  fix: a configuration with tie_word_embeddings: false, by --config FOLDER; "
                    "or --to safetensors"
                )
    return {name: weights[own] for name, (own, *_) in matched.items()}


# ------------------------------------------------------------------------------------------- adapters of peft


def _merged(
    model: Pretrained, weights: Mapping[str, Weight], exact: Mapping[str, Weight], aliases: Mapping[str, str]
) -> dict[str, Weight]:
    """The weights by the names of the base model, each merged by peft when it is written."""
    if model.adapted is None:
        raise refused("--merge-lora", None, "the checkpoint's model has no adapters of peft", "leave it out")
    kinds = [str(each.peft_type.value) for each in model.adapted.peft_config.values()]
    if kinds != ["LORA"]:
        message = f"the model has adapters of {', '.join(kinds)}, and one LoRA alone is merged"
        raise refused("--merge-lora", None, message, "export without --merge-lora")

    def merge(module: Any, name: str, parts: Mapping[str, Weight]) -> Iterator[torch.Tensor]:
        own = copy.deepcopy(module)
        own.load_state_dict({each: weight.whole() for each, weight in parts.items()}, assign=True)
        own.merge()
        yield own.get_base_layer().state_dict()[name]

    found: dict[str, Weight] = {}
    inside: set[str] = set()
    for path, module in model.adapted.named_modules():
        if not hasattr(module, "get_base_layer") or not hasattr(module, "merge"):
            continue
        own = {name: f"{model.prefix}{path}.{name}" for name in module.state_dict()}
        own = {name: aliases.get(each, each) for name, each in own.items()}
        inside |= set(own.values())
        parts = {name: exact[each] for name, each in own.items()}
        for name in module.get_base_layer().state_dict():
            read = partial(merge, module, name, parts)
            found[_in_base(f"{path}.{name}")] = replace(weights[own[LAYER + name]], read=read)
    for name, each in weights.items():
        if name not in inside and ORIGINAL not in name:
            found[_in_base(name.removeprefix(model.prefix))] = each
    return found


def _in_base(name: str) -> str:
    """A name of a peft model in its base model: a module that is trained whole is beside its first weights."""
    return SAVED.sub(".", name.removeprefix(BASE).replace(f".{LAYER}", "."))


def _adapter(
    model: Pretrained, weights: Mapping[str, Weight], aliases: Mapping[str, str]
) -> dict[str, Weight]:
    """The adapter's tensors by the names that peft writes."""
    import peft

    own, names = {}, {}
    for name, tensor in model.adapted.state_dict(keep_vars=True).items():
        stored = aliases.get(model.prefix + name, model.prefix + name)
        if stored in weights:
            own[name], names[id(tensor)] = tensor, stored
    kept = peft.get_peft_model_state_dict(model.adapted, state_dict=own, save_embedding_layers=False)
    return {name: weights[names[id(tensor)]] for name, tensor in kept.items()}


# ------------------------------------------------------------------------------------------- the target


def check_target(source: Path, out: Path, *, force: bool, is_file: bool = False) -> None:
    """Refuse a target that holds the source or lies in it, and one that may not be replaced.

    Replaced is, with ``force``, a file, or what was made here in a folder; what else is in that folder stays.
    """
    inside, exists = (
        "name a folder outside it",
        out.exists() and not (out.is_dir() and not any(out.iterdir())),
    )
    if out.resolve().is_relative_to(source.resolve()):
        raise refused("--output", out, f"lies in {source}", inside)
    if source.resolve().is_relative_to(out.resolve()):
        raise refused("--output", out, f"holds {source}", "name another folder")
    if out.exists() and out.is_dir() == is_file:
        kind = "folder, and a file" if is_file else "file, and a folder"
        raise refused("--output", out, f"is a {kind} is to be made", "name another")
    if exists and not force:
        raise refused("--output", out, "exists already", "name another, or add --force to replace it")
    if exists and not is_file and _made_in(out) is None:
        message = (
            f"was not made by det-ds checkpoint export or import (it has no {MADE}), and is not replaced"
        )
        raise refused("--output", out, message, "name another folder, or remove this one yourself")


def _made_in(folder: Path) -> list[str] | None:
    """The names of the files that an earlier export or import has made in a folder; None where it has made none."""
    try:
        return [str(name) for name in json.loads((folder / MADE).read_bytes())["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_disk(out: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk has no room for."""
    folder = existing(out.absolute().parent)
    if num_bytes + OTHER_BYTES > shutil.disk_usage(folder).free:
        raise CheckpointError(
            f"no space left on the disk of {out}: {room_in(folder)}, and {format_bytes(num_bytes)} are needed\n"
            "  fix: free some space, or --output on another disk; --dtype bf16 takes half of fp32"
        )


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A name beside a target, which takes its place when all is written; nothing is left where that fails.

    Of a folder that was made here, the files that were made are replaced, and all others stay.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}{PARTIAL}")
    try:
        yield aside
        files: list[str] = []
        if aside.is_dir():
            files = [str(file.relative_to(aside)) for file in sorted(aside.rglob("*")) if file.is_file()]
            (aside / MADE).write_text(json.dumps({"files": files}, indent=1) + "\n")
        sync_to_disk(aside)
        before = _made_in(out)
        if before is None:
            aside.replace(out)
            return
        for name in before:
            if (out / name).resolve().is_relative_to(out.resolve()):
                (out / name).unlink(missing_ok=True)
        for name in (*files, MADE):  # the list last: until then, it can be done again
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(out / name)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
