"""DeepSpeed JSONs by themselves: made from Python, loaded, saved, and judged without the experiment that names them.

There are no rules of their own: what is made is handed to ``reconcile``, so that it refuses exactly what a run would.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from determined_ds.config.ds_schema import ZERO, known_keys, located_problems, normalized, params_of
from determined_ds.config.fill import disagreements
from determined_ds.config.layout import assumed_cuda
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document, nearest, one_of
from determined_ds.documents.files import read_json, write_files
from determined_ds.documents.text import as_plain, kind_of
from determined_ds.errors import ConfigError, Problem, shown

Auto = Literal["auto"]
Offload = Literal["cpu", "nvme"] | Mapping[str, Any] | bool | None

PRECISIONS: dict[str, dict[str, Any]] = {
    AUTO: {"bf16": {"enabled": AUTO}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {"bf16": {"enabled": False}},
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
# What True and False stand for, where they are no values themselves.
SWITCHES: dict[str, dict[bool, Any]] = {
    **{what: {True: "cpu", False: None} for what in OFFLOADS},
    **{name: {False: None} for name in ("optimizer", "scheduler", "activation_checkpointing")},
    "gradient_clipping": {False: 0.0},
}


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
    activation_checkpointing: Mapping[str, Any] | Literal[False] | None = None,
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    sections: Mapping[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """A DeepSpeed configuration, as :func:`save_deepspeed_config` writes and a run reads it.

    ``"auto"`` is filled once it is known what will run: batch sizes from ``global_batch_size`` and the slots, the
    precision from the accelerator, the rest from hyperparameters. None leaves a key to DeepSpeed's own default.

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
        activation_checkpointing: DeepSpeed's section, for models that call ``deepspeed.checkpointing``; False is None.
        grad_accum_dtype: Type that gradients are added up in (``data_types.grad_accum_dtype``).
        sections: Any other keys of DeepSpeed's, which overwrite the above leaf by leaf.
        others: Any key of ``zero_optimization``, e.g. ``overlap_comm=True``; and names that other documents use for
            the above: ``stage``, ``lr``, ``max_grad_norm``, ``bf16=True`` and those of :data:`OTHER_NAMES`.

    Returns:
        A plain dict.

    Raises:
        ConfigError: everything that is wrong: unknown names with the nearest known, types and ranges, and what the
            compatibility table refuses.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and ``runtime/zero/config.py``.
    """
    given = {name: as_plain(value) for name, value in locals().items()}
    of_zero = _by_real_names(given, given.pop("others"))
    if given["zero_stage"] is None:
        raise TypeError("create_deepspeed_config() missing 1 required keyword-only argument: 'zero_stage'")
    for name, value in given.items():
        if isinstance(value, bool):
            given[name] = SWITCHES.get(name, {}).get(value, value)
    stated, problems = Document(name="", data=given), []
    for name in ("optimizer_params", "scheduler_params", "sections", *OFFLOADS):
        form = 'a mapping, e.g. {"eps": 1e-6}'
        if name in OFFLOADS:
            form = '"cpu", "nvme", or what create_offload_config returns'
            if isinstance(given[name], str):
                given[name] = {"device": given[name], "pin_memory": AUTO}
        if given[name] is not None and not isinstance(given[name], dict):
            message = f"must be a mapping, not {kind_of(given[name])}"
            problems.append(stated.problem((name,), message, f"write {form}", "wrong-type"))
    _refuse(problems)
    if str(given["precision"]) not in PRECISIONS:
        fix = one_of(PRECISIONS, given["precision"])
        problems.append(stated.problem(("precision",), "no such precision", fix, "out-of-range"))
    on_nvme = [given[what] for what in OFFLOADS if (given[what] or {}).get("device") == "nvme"]
    if given["nvme_path"] is not None:
        for section in on_nvme:
            section["nvme_path"] = section.get("nvme_path") or given["nvme_path"]
        if not on_nvme:
            fix = 'add offload_optimizer="nvme" or offload_param="nvme", or leave nvme_path out'
            message = "nothing is offloaded to nvme"
            problems.append(stated.problem(("nvme_path",), message, fix, "offload-nvme-path"))
    made: dict[str, Any] = {
        "train_batch_size": given["train_batch_size"],
        "train_micro_batch_size_per_gpu": given["micro_batch_size"],
        "gradient_accumulation_steps": given["gradient_accumulation_steps"],
        ZERO: {"stage": given["zero_stage"], **{what: given[what] for what in OFFLOADS}, **of_zero},
    }
    rate, warm_up, steps = (given[name] for name in ("learning_rate", "warmup_num_steps", "total_num_steps"))
    own = {"lr": rate, **{name: given[name] for name in ("betas", "eps", "weight_decay")}}
    of_rate = {
        "warmup_min_lr": AUTO,
        "warmup_max_lr": rate,
        "warmup_num_steps": warm_up,
        "total_num_steps": steps,
    }
    for section, parameters in (("optimizer", own), ("scheduler", of_rate)):
        if (kind := given[section]) is not None:
            takes = params_of(section, kind)
            made[section] = {"type": kind, "params": {}}
            for key, value in parameters.items():  # "auto" where the chosen one takes that parameter
                is_stated = value != AUTO and key != "warmup_max_lr"
                if is_stated or (key in takes if takes is not None else key == "lr"):
                    made[section]["params"][key] = value
            if takes is not None and "warmup_type" in takes:
                made[section]["params"]["warmup_type"] = "linear"
            made[section]["params"] |= given[f"{section}_params"] or {}
            made[section] = {key: value for key, value in made[section].items() if value != {}}
    made["gradient_clipping"] = given["gradient_clipping"]
    made |= as_plain(PRECISIONS.get(str(given["precision"]), {}))
    made["activation_checkpointing"] = given["activation_checkpointing"]
    if given["grad_accum_dtype"] is not None:
        made["data_types"] = {"grad_accum_dtype": given["grad_accum_dtype"]}
    made[ZERO] = {key: value for key, value in made[ZERO].items() if value is not None}
    made = {key: value for key, value in made.items() if value is not None}
    document = Document(name="create_deepspeed_config", data=made)
    further = (((key,), value, "argument sections") for key, value in (given["sections"] or {}).items())
    document = document.overwritten_all(further)
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
    given = {name: as_plain(value) for name, value in locals().items() if value is not None}
    section = {"device": given.pop("offload_device"), **given}
    known = known_keys()["properties"][ZERO]["properties"]
    # It is checked as the one that takes most of its keys; where both do, as parameters.
    as_what = max(reversed(OFFLOADS), key=lambda what: len(section.keys() & known[what]["properties"].keys()))
    prefix = f"{ZERO}.{as_what}."
    found, _ = problems_alone(Document(name="", data={ZERO: {"stage": 3, as_what: section}}))
    _refuse(
        replace(each, key=each.key.removeprefix(prefix), origin="", fix=each.fix.replace(prefix, ""))
        for each in found
    )
    return section


def _refuse(problems: Iterable[Problem]) -> None:
    if found := list(problems):
        raise ConfigError(found)


def _by_real_names(given: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments by other names where they belong in ``given``; what is left is of ``zero_optimization``.

    Without bf16 and fp16 the precision is fp32; ``fp16=False`` alone leaves it as it is.
    """
    written, of_zero, problems = Document(name="", data=dict(others)), {}, []
    switches: dict[str, bool] = {}
    for name, value in others.items():
        message, fix, code = "", "", "other-name"
        if name in OTHER_NAMES:
            real = OTHER_NAMES[name]
            if given[real] not in (None, AUTO, value):
                message = f"is another name of {real}, which is {shown(given[real])}"
                fix = f"keep {real} only"
            given[real] = value
        elif name in ("bf16", "fp16"):
            if isinstance(value, bool):
                switches[name] = value
            elif value not in (None, AUTO):
                fix = f'write precision="{name}"; what else the section holds goes into sections'
                message, code = f"must be True or False, not {kind_of(value)}", "wrong-type"
        elif name in known_keys()["properties"][ZERO]["properties"]:
            of_zero[name] = value
        else:
            guess = nearest(name, [*given, *OTHER_NAMES, "bf16", "fp16"])
            message, fix = "no such argument", f"use one of {', '.join(given)}"
            if name in known_keys()["properties"]:
                fix = f"write sections={{{name!r}: ...}}"
            elif guess:
                fix = f"did you mean {guess}?"
        if message:
            problems.append(written.problem((name,), message, fix, code))
    asked = {name for name, value in switches.items() if value}
    stated = {str(given["precision"])} - {AUTO}
    if len(asked | stated) > 1 or stated & (switches.keys() - asked):
        name, *rest = switches
        clashing = [
            *(f"{other}={switches[other]}" for other in rest),
            *(f"precision={each!r}" for each in stated),
        ]
        message = f"does not go together with {', '.join(clashing)}"
        problems.append(written.problem((name,), message, "keep precision only", "other-name"))
    elif asked or (switches.get("bf16") is False and not stated):
        given["precision"] = asked.pop() if asked else "fp32"
    _refuse(problems)
    return of_zero


def problems_alone(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with a DeepSpeed JSON in every experiment that could name it.

    It is judged by ``reconcile``, on GPUs of every ability, as many as its own batch or ZeRO++ asks for.

    Returns:
        Errors, and warnings.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = (ds.get(path) for path in (*((key,) for key in keys), (ZERO, "zero_hpz_partition_size")))
    total, micro, steps, hpz = (n if type(n) is int and 0 < n < 2**31 else None for n in numbers)
    slots = min(hpz or 1, 2**16)
    if total and micro and steps:
        slots = max(1, total // (micro * steps))
    elif total and (micro or steps):
        slots = 1
    batch = {} if total else {"global_batch_size": (micro or 1) * (steps or 1) * slots}
    given = Document(name="hyperparameters", data=batch, prefix="hyperparameters")
    try:
        return [], [*reconcile(given, ds, slots=slots, accelerator=assumed_cuda(slots)).warnings]
    except ConfigError as error:  # what nothing determines yet, a hyperparameter of the experiment will
        return [problem for problem in error.problems if problem.code != "auto-undetermined"], []


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
    """
    document = read_json(Path(path))
    _refuse(problem for _, problem in located_problems(document))
    return normalized(document).data


def save_deepspeed_config(config: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a DeepSpeed JSON, indented by two, so that the same configuration always gives the same bytes.

    Args:
        config: A DeepSpeed configuration; ``"auto"`` is kept, and so is the order of its keys.
        path: Of the file; its folder is made where it is missing.
        overwrite: Whether a file that is there is replaced.

    Raises:
        ConfigError: a key that DeepSpeed does not know (with the nearest that it does), a value that it reads as
            another type or that JSON cannot hold, a file that is there already, or one that cannot be written.
    """
    write_files({Path(path): deepspeed_config_text(config)}, overwrite=overwrite, permission="overwrite=True")


def deepspeed_config_text(config: Mapping[str, Any]) -> str:
    """The text of a DeepSpeed JSON. See :func:`save_deepspeed_config`."""
    document, message = Document(name="config", data={}), ""
    fix = "write strings, finite numbers, true, false, null, lists and mappings by strings"
    try:
        if isinstance(config, Mapping):
            document = Document(name="config", data=as_plain(config))
            text = json.dumps(document.data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        else:
            message = f"must be a mapping, not {kind_of(config)}"
            fix = "save_deepspeed_config(config, path): the configuration comes first"
    except RecursionError:
        message = "is nested too deep, or holds itself"
    except (TypeError, ValueError) as error:
        message = f"cannot be written as JSON: {error}"
    if message:
        raise ConfigError(Problem(key="config", message=message, fix=fix, code="wrong-type"))
    _refuse(problem for _, problem in located_problems(document))
    return text
