"""DeepSpeed JSONs by themselves: made from Python, loaded, saved, and judged without the experiment that names them.

The arguments have DeepSpeed's names. There are no rules of their own: what is made is handed to ``reconcile``, so that
it refuses exactly what a run would refuse.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from determined_ds.config.ds_schema import (
    ZERO,
    known_keys,
    located_problems,
    normalized,
    params_of,
)
from determined_ds.config.fill import disagreements
from determined_ds.config.layout import BATCH_KEYS, assumed_cuda, complete_batch
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document, KeyPath, nearest, one_of
from determined_ds.documents.files import read_json, write_files
from determined_ds.documents.text import kind_of
from determined_ds.errors import ConfigError, Problem, shown

Auto = Literal["auto"]
Offload = Literal["cpu", "nvme"] | Mapping[str, Any] | bool | None

PRECISIONS: dict[str, dict[str, bool | str]] = {
    AUTO: {"bf16": AUTO},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp32": {"bf16": False},
}
OFFLOADS = ("offload_optimizer", "offload_param")
# Names of arguments that other documents use, where they mean the same.
OTHER_NAMES = {
    "stage": "zero_stage",
    "global_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "lr": "learning_rate",
    "max_grad_norm": "gradient_clipping",
}
# The keys that every template has, in the templates' order; all others follow as they stand.
FIRST_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    ZERO,
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "bf16",
    "fp16",
)


# Arguments that may be switched off, or on -> what that stands for.
SWITCHES: dict[str, dict[bool, Any]] = {
    **{what: {True: "cpu", False: None} for what in OFFLOADS},
    **{name: {False: None} for name in ("optimizer", "scheduler", "activation_checkpointing")},
    "gradient_clipping": {False: 0.0},
}
OF_ZERO = (
    *OFFLOADS,
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
)


def create_deepspeed_config(
    *,
    zero_stage: int | None = None,
    train_batch_size: int | Auto = "auto",
    micro_batch_size: int | Auto = "auto",
    gradient_accumulation_steps: int | Auto = "auto",
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    optimizer: str | Literal[False] | None = "AdamW",
    learning_rate: float | Auto = "auto",
    betas: Sequence[float] | Auto = "auto",
    eps: float | Auto = "auto",
    weight_decay: float | Auto = "auto",
    optimizer_params: Mapping[str, Any] | None = None,
    scheduler: str | Literal[False] | None = "WarmupLR",
    warmup_num_steps: int | Auto = "auto",
    total_num_steps: int | Auto = "auto",
    scheduler_params: Mapping[str, Any] | None = None,
    gradient_clipping: float | Auto = "auto",
    offload_optimizer: Offload = None,
    offload_param: Offload = None,
    nvme_path: str | None = None,
    zero_hpz_partition_size: int | None = None,
    zero_quantized_weights: bool | None = None,
    zero_quantized_gradients: bool | None = None,
    overlap_comm: bool | None = None,
    contiguous_gradients: bool | None = None,
    reduce_bucket_size: int | None = None,
    allgather_bucket_size: int | None = None,
    stage3_prefetch_bucket_size: int | None = None,
    stage3_param_persistence_threshold: int | None = None,
    stage3_gather_16bit_weights_on_model_save: bool | None = None,
    activation_checkpointing: Mapping[str, Any] | Literal[False] | None = None,
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    sections: Mapping[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """A DeepSpeed configuration, as :func:`save_deepspeed_config` writes and a run reads it.

    ``"auto"`` is filled once it is known what will run: batch sizes from ``global_batch_size`` and the slots, the
    precision from the accelerator, the rest from hyperparameters. None, the default of most, leaves a key to
    DeepSpeed's own default.

    Args:
        zero_stage: 0 to 3: nothing, the optimizer's state, gradients too, parameters too is split over replicas.
        train_batch_size: Samples an optimizer step over all replicas, >= 1.
        micro_batch_size: Samples a forward pass of a replica (``train_micro_batch_size_per_gpu``), >= 1.
        gradient_accumulation_steps: Micro-batches an optimizer step of a replica, >= 1.
        precision: What the model computes in; ``"auto"`` is bf16 where the accelerator is made for it, else fp32.
        optimizer: DeepSpeed's or torch's name; None or False where the trial builds its own.
        learning_rate: ``lr`` of the optimizer and peak of the schedule, >= 0.
        betas: Two numbers in [0, 1).
        eps: > 0.
        weight_decay: >= 0.
        optimizer_params: Further parameters of the optimizer, or others than the above.
        scheduler: DeepSpeed's or torch's name; None or False for none.
        warmup_num_steps: Optimizer steps.
        total_num_steps: Optimizer steps, for schedules that end; ``"auto"`` is ``fit.max_length``.
        scheduler_params: Further parameters of the schedule.
        gradient_clipping: Greatest norm of the gradient, >= 0; 0 or False does not clip. ``"auto"`` is 1 unless a
            hyperparameter says otherwise.
        offload_optimizer: ``"cpu"``, ``"nvme"`` or what :func:`create_offload_config` returns; stages 1 to 3. True is
            ``"cpu"``, False is None.
        offload_param: The same; stage 3.
        nvme_path: Folder for what is offloaded to nvme.
        zero_hpz_partition_size: ZeRO++: ranks that hold a second copy of the parameters between them, usually
            the GPUs of one machine; stage 3.
        zero_quantized_weights: ZeRO++: parameters are gathered in 8 bits; stage 3, CUDA.
        zero_quantized_gradients: ZeRO++: gradients are reduced in 4 bits; stage 3, CUDA.
        overlap_comm: Whether gradients are reduced during the backward pass.
        contiguous_gradients: Whether gradients are copied to one buffer as they come.
        reduce_bucket_size: Elements reduced at once, > 0.
        allgather_bucket_size: Elements gathered at once, >= 0.
        stage3_prefetch_bucket_size: Elements fetched ahead, >= 0.
        stage3_param_persistence_threshold: Elements below which a parameter is not split, >= 0.
        stage3_gather_16bit_weights_on_model_save: Whether ``save_16bit_model`` may gather the whole model.
        activation_checkpointing: DeepSpeed's section, for models that call ``deepspeed.checkpointing``; False is None.
        grad_accum_dtype: Type that gradients are added up in (``data_types.grad_accum_dtype``).
        sections: Any other keys of DeepSpeed's, which overwrite the above leaf by leaf.
        others: The above by names that other documents use: ``stage``, ``lr``, ``max_grad_norm``, ``bf16=True`` and
            those of :data:`OTHER_NAMES`. Any other name is refused.

    Returns:
        A plain dict.

    Raises:
        ConfigError: everything that is wrong: unknown keys with the nearest known, types and ranges, and what the
            compatibility table refuses.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and ``runtime/zero/config.py``.
    """
    given = dict(locals())
    given = plain(_by_real_names(given, given.pop("others")))
    if given["zero_stage"] is None:
        raise TypeError("create_deepspeed_config() missing 1 required keyword-only argument: 'zero_stage'")
    for name, value in given.items():
        if isinstance(value, bool):
            given[name] = SWITCHES.get(name, {}).get(value, value)
    stated = Document(name="", data=given)
    fixes = dict.fromkeys(
        ("optimizer_params", "scheduler_params", "sections"), 'write a mapping, e.g. {"eps": 1e-6}'
    )
    fixes |= dict.fromkeys(OFFLOADS, 'write "cpu", "nvme", or what create_offload_config returns')
    _refuse(
        stated.problem((name,), f"must be a mapping, not {kind_of(given[name])}", fix, "wrong-type")
        for name, fix in fixes.items()
        if not isinstance(given[name], (dict, str) if name in OFFLOADS else dict) and given[name] is not None
    )
    document = Document(name="create_deepspeed_config", data={})
    for path, (argument, value) in _leaves(given).items():
        if value is not None:
            document = document.overwritten(path, value, f"argument {argument}")
    for key, value in (given["sections"] or {}).items():
        document = document.overwritten((key,), value, "argument sections")
    problems = []
    if not isinstance(given["precision"], str) or given["precision"] not in PRECISIONS:
        fix = one_of(PRECISIONS, given["precision"])
        problems.append(stated.problem(("precision",), "no such precision", fix, "out-of-range"))
    on_nvme = [what for what in OFFLOADS if document.get((ZERO, what, "device")) == "nvme"]
    for what in on_nvme:
        path = (ZERO, what, "nvme_path")
        if given["nvme_path"] is not None and document.get(path) is None:
            document = document.overwritten(path, given["nvme_path"], "argument nvme_path")
    if given["nvme_path"] is not None and not on_nvme:
        fix = 'add offload_optimizer="nvme" or offload_param="nvme", or leave nvme_path out'
        message = "nothing is offloaded to nvme"
        problems.append(stated.problem(("nvme_path",), message, fix, "offload-nvme-path"))
    rates = disagreements(document, Document(name="", data={}))
    _refuse([*problems, *problems_alone(document)[0], *rates])
    return normalized(document).data


def create_offload_config(
    offload_device: Literal["cpu", "nvme"] = "cpu",
    *,
    nvme_path: str | None = None,
    pin_memory: bool | Auto = "auto",
    buffer_count: int | None = None,
    buffer_size: int | None = None,
    max_in_cpu: int | None = None,
    pipeline_read: bool | None = None,
    pipeline_write: bool | None = None,
    fast_init: bool | None = None,
    ratio: float | None = None,
) -> dict[str, Any]:
    """Where ZeRO keeps what the accelerator's memory has no room for: ``offload_optimizer`` or ``offload_param``.

    None leaves a key to DeepSpeed's own default.

    Args:
        offload_device: ``"cpu"`` is the host's memory, ``"nvme"`` files (stage 3).
        nvme_path: Folder on a local disk; needed for ``"nvme"``.
        pin_memory: Whether host memory is pinned, for faster copies; ``"auto"``: on with CUDA.
        buffer_count: Buffers for nvme, >= 0; Adam needs 4 or more.
        buffer_size: Of ``offload_param``: elements a buffer, >= 0.
        max_in_cpu: Of ``offload_param`` to nvme: elements kept in host memory, >= 0.
        pipeline_read: Of ``offload_optimizer`` to nvme: read the next tile while this one is computed.
        pipeline_write: Of ``offload_optimizer`` to nvme: write the last tile while this one is computed.
        fast_init: Of ``offload_optimizer`` to nvme: initialize faster.
        ratio: Of ``offload_optimizer``: the part of it that is offloaded, 0 to 1 (stage 3).

    Returns:
        A plain dict.

    Raises:
        ConfigError: a value that DeepSpeed does not take, keys of the two that exclude each other, or nvme without
            a path.

    Source: ``runtime/zero/offload_config.py`` in deepspeed 0.19.8.
    """
    given = plain(dict(locals()))
    section = {"device": given.pop("offload_device")}
    section.update((key, value) for key, value in given.items() if value is not None)
    known = known_keys()["properties"][ZERO]["properties"]
    # It is checked as the one that takes most of its keys; where both do, as parameters.
    as_what = max(reversed(OFFLOADS), key=lambda what: len(section.keys() & known[what]["properties"].keys()))
    prefix = f"{ZERO}.{as_what}."
    found, _ = problems_alone(Document(name="", data={ZERO: {"stage": 3, as_what: section}}))
    _refuse(
        replace(problem, key=problem.key.removeprefix(prefix), origin="", fix=problem.fix.replace(prefix, ""))
        for problem in found
    )
    return section


def _refuse(problems: Iterable[Problem]) -> None:
    found = list(problems)
    if found:
        raise ConfigError(found)


def _leaves(given: Mapping[str, Any]) -> dict[KeyPath, tuple[str, Any]]:
    """Key path -> the argument that says it, and its value, in the order of the templates."""
    leaves: dict[KeyPath, tuple[str, Any]] = {
        ("train_batch_size",): ("train_batch_size", given["train_batch_size"]),
        ("train_micro_batch_size_per_gpu",): ("micro_batch_size", given["micro_batch_size"]),
        ("gradient_accumulation_steps",): (
            "gradient_accumulation_steps",
            given["gradient_accumulation_steps"],
        ),
        (ZERO, "stage"): ("zero_stage", given["zero_stage"]),
        **{(ZERO, name): (name, given[name]) for name in OF_ZERO},
    }
    for what in OFFLOADS:
        if isinstance(given[what], str):
            leaves[ZERO, what] = (what, {"device": given[what], "pin_memory": AUTO})
    of_sections = {
        "optimizer": {"lr": "learning_rate", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"},
        "scheduler": {
            "warmup_min_lr": "",
            "warmup_max_lr": "learning_rate",
            "warmup_num_steps": "warmup_num_steps",
            "total_num_steps": "total_num_steps",
        },
    }
    for section, arguments in of_sections.items():
        kind = given[section]
        if kind is None:
            continue
        leaves[section, "type"] = (section, kind)
        takes = params_of(section, kind)
        for key, argument in arguments.items():  # "auto" where the chosen one takes that parameter
            value = given.get(argument, AUTO)
            stated = value != AUTO and key != "warmup_max_lr"
            if stated or (key in takes if takes is not None else key == "lr"):
                leaves[section, "params", key] = (argument or section, value)
        if takes is not None and "warmup_type" in takes:
            leaves[section, "params", "warmup_type"] = (section, "linear")
        for key, value in (given[f"{section}_params"] or {}).items():
            leaves[section, "params", key] = (f"{section}_params", value)
    for name in ("gradient_clipping", "activation_checkpointing"):
        leaves[name,] = (name, given[name])
    leaves["data_types", "grad_accum_dtype"] = ("grad_accum_dtype", given["grad_accum_dtype"])
    for section, enabled in PRECISIONS.get(str(given["precision"]), {}).items():
        leaves[section,] = ("precision", {"enabled": enabled})
    return leaves


def _by_real_names(given: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by their own names, with ``precision`` as switches like ``bf16=True`` say.

    Without bf16 and fp16 it is fp32; ``fp16=False`` alone leaves it as it is.
    """
    written = Document(name="", data=dict(others))
    problems: list[Problem] = []
    switches: dict[str, bool] = {}
    for name, value in others.items():
        if name in OTHER_NAMES:
            real = OTHER_NAMES[name]
            if given[real] not in (None, AUTO, value):
                message = f"is another name of {real}, which is {shown(given[real])}"
                problems.append(written.problem((name,), message, f"keep {real} only", "other-name"))
            given[real] = value
        elif name not in ("bf16", "fp16"):
            guess = nearest(name, [*given, *OTHER_NAMES, "bf16", "fp16"])
            fix = f"did you mean {guess}?" if guess else f"use one of {', '.join(given)}"
            if name in known_keys()["properties"]:
                fix = f"write sections={{{name!r}: ...}}"
            problems.append(written.problem((name,), "no such argument", fix, "other-name"))
        elif isinstance(value, bool):
            switches[name] = value
        elif value not in (None, AUTO):
            fix = f'write precision="{name}"; what else the section holds goes into sections'
            message = f"must be True or False, not {kind_of(value)}"
            problems.append(written.problem((name,), message, fix, "wrong-type"))
    precision = given["precision"]
    on = [name for name, value in switches.items() if value]
    off = [name for name, value in switches.items() if not value]
    if len(on) > 1 or precision in off or (on and precision not in (AUTO, *on)):
        name, *rest = switches
        clashing = [f"{other}={switches[other]}" for other in rest]
        clashing += [f"precision={precision!r}"] if precision != AUTO else []
        message = f"does not go together with {', '.join(clashing)}"
        problems.append(written.problem((name,), message, "keep precision only", "other-name"))
    elif on:
        given["precision"] = on[0]
    elif "bf16" in off and precision == AUTO:
        given["precision"] = "fp32"
    _refuse(problems)
    return given


# ------------------------------------------------------------------------------------------- judged alone


def problems_alone(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with a DeepSpeed JSON in every experiment that could name it.

    It is judged by ``reconcile``, on GPUs of every ability, as many as its own batch asks for.

    Returns:
        Errors, and warnings.
    """
    numbers = {name: ds.get((key,)) for key, name in BATCH_KEYS.items()}
    numbers = {name: n for name, n in numbers.items() if isinstance(n, int) and n is not True and n > 0}
    hyperparameters: dict[str, int] = {}
    problems: list[Problem] = []
    hpz = ds.get((ZERO, "zero_hpz_partition_size"))
    # As many slots as ZeRO++ asks for, so that they can be split so.
    slots = hpz if isinstance(hpz, int) and 1 <= hpz <= 2**16 and hpz is not True else 1
    if "global_batch_size" not in numbers:
        hyperparameters["global_batch_size"] = math.prod(numbers.values()) * slots
    elif len(numbers) > 1:
        try:
            batch = complete_batch(**{"micro_batch_size": 1, "accumulation": 1, **numbers})
            slots = batch.replicas if len(numbers) == len(BATCH_KEYS) else 1
        except ConfigError as error:
            ours, theirs = "global_batch_size", "train_batch_size"
            problems += [
                replace(problem, key=theirs, fix=problem.fix.replace(ours, theirs))
                for problem in error.problems
            ]
            for key in BATCH_KEYS:
                ds = ds.overwritten((key,), 1, ds.origin((key,)))
            slots = 1
    given = Document(name="hyperparameters", data=dict(hyperparameters), prefix="hyperparameters")
    try:
        warnings = reconcile(given, ds, slots=slots, accelerator=assumed_cuda(slots)).warnings
    except ConfigError as error:  # what nothing determines yet, a hyperparameter of the experiment will
        problems += [problem for problem in error.problems if problem.code != "auto-undetermined"]
        return problems, []
    return problems, [*warnings]


# ------------------------------------------------------------------------------------------- files


def load_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON, and refuse what DeepSpeed would not read in it.

    Args:
        path: Of the file. Only JSON: no comments, no commas at the end.

    Returns:
        A plain dict, ``"auto"`` where the file says so. Whole floats are integers where DeepSpeed takes
        integers (``5e8``).

    Raises:
        ConfigError: the file cannot be read, or is not JSON, or repeats a key, or has one that DeepSpeed does not
            know, reads as another type, or has renamed; all of them, each with its line.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and what it reads further.
    """
    document = read_json(Path(path))
    _refuse(problem for _, problem in located_problems(document))
    return normalized(document).data


def save_deepspeed_config(config: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a DeepSpeed JSON, indented by two, so that the same configuration always gives the same bytes.

    Args:
        config: A DeepSpeed configuration; ``"auto"`` is kept. The keys of the project's templates come first,
            in the templates' order, all others as they stand.
        path: Of the file; its folder is made where it is missing.
        overwrite: Whether a file that is there is replaced.

    Raises:
        ConfigError: a key that DeepSpeed does not know (with the nearest that it does), a value that it reads as
            another type or that JSON cannot hold, a file that is there already, or one that cannot be written.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and what it reads further.
    """
    text = deepspeed_config_text(config)
    write_files({Path(path): text}, overwrite=overwrite, permission="overwrite=True")


def deepspeed_config_text(config: Mapping[str, Any]) -> str:
    """The text of a DeepSpeed JSON. See :func:`save_deepspeed_config`."""
    if not isinstance(config, Mapping):
        message = f"must be a mapping, not {kind_of(config)}"
        fix = "save_deepspeed_config(config, path): the configuration comes first"
        raise ConfigError(Problem(key="config", value=config, message=message, fix=fix, code="wrong-type"))
    try:
        data = plain(config)
    except RecursionError:
        message, fix = "is nested too deep, or holds itself", "write plain values only"
        raise ConfigError(Problem(key="config", message=message, fix=fix, code="wrong-type")) from None
    document = Document(name="config", data=data)
    _refuse(list(_unwritable(document, (), data)) or [problem for _, problem in located_problems(document)])
    first = {key: data[key] for key in FIRST_KEYS if key in data}
    return json.dumps({**first, **data}, indent=2, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """A deep copy in the types that JSON has: mappings are dicts, tuples lists, paths strings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _unwritable(document: Document, path: KeyPath, value: Any) -> Iterator[Problem]:
    """What JSON has no form for."""
    message = ""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _unwritable(document, (*path, key), item)
            else:
                message = f"a key of JSON must be a string, not {key!r}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unwritable(document, (*path, index), item)
    elif isinstance(value, float) and not math.isfinite(value):
        message = "JSON has finite numbers only"
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        message = f"JSON has no form for a {type(value).__name__}"
    if message:
        key = document.key(path) or "config"
        fix = "write a string, a finite number, true, false, null or a list"
        yield Problem(key=key, value=value, message=message, fix=fix, code="wrong-type")
