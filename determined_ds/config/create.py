"""DeepSpeed JSONs by themselves: made from Python, loaded, saved, and judged without the experiment that names them.

There are no rules of their own: what is made is handed to ``reconcile``, so that it refuses exactly what a run would.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from determined_ds.config.ds_schema import ZERO, known_keys, located_problems, normalized, params_of
from determined_ds.config.fill import disagreements
from determined_ds.config.layout import BATCH_KEYS, assumed_cuda
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document, KeyPath, one_of, unknown_key
from determined_ds.documents.files import read_json, write_files
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem, shown

Auto = Literal["auto"]
Offload = Literal["cpu", "nvme"] | Mapping[str, Any] | None

PRECISIONS: dict[str, dict[str, Any]] = {
    AUTO: {"bf16": {"enabled": AUTO}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {"bf16": {"enabled": False}},
}
# Names of arguments that other documents use, where they mean the same.
OTHER_NAMES = {
    "stage": "zero_stage",
    "global_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "lr": "learning_rate",
    "max_grad_norm": "gradient_clipping",
}


def create_deepspeed_config(
    *,
    zero_stage: int | None = None,
    train_batch_size: int | Auto = "auto",
    micro_batch_size: int | Auto = "auto",
    gradient_accumulation_steps: int | Auto = "auto",
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    optimizer: str | None = "AdamW",
    learning_rate: float | Auto = "auto",
    betas: Sequence[float] | Auto = "auto",
    eps: float | Auto = "auto",
    weight_decay: float | Auto = "auto",
    optimizer_params: Mapping[str, Any] | None = None,
    scheduler: str | None = "WarmupLR",
    warmup_num_steps: int | Auto = "auto",
    total_num_steps: int | Auto = "auto",
    scheduler_params: Mapping[str, Any] | None = None,
    gradient_clipping: float | Auto = "auto",
    offload_optimizer: Offload = None,
    offload_param: Offload = None,
    activation_checkpointing: Mapping[str, Any] | None = None,
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
        optimizer: DeepSpeed's or torch's name; None where the trial builds its own.
        learning_rate: ``lr`` of the optimizer and peak of the schedule, >= 0.
        betas: Two numbers in [0, 1).
        eps: > 0.
        weight_decay: >= 0.
        optimizer_params: Further parameters of the optimizer, or others than the above.
        scheduler: DeepSpeed's or torch's name; None for none.
        warmup_num_steps: Optimizer steps.
        total_num_steps: Optimizer steps, for schedules that end; ``"auto"`` is ``fit.max_length``.
        scheduler_params: Further parameters of the schedule.
        gradient_clipping: Greatest norm of the gradient, >= 0; 0 does not clip. ``"auto"`` is 1 unless a
            hyperparameter says otherwise.
        offload_optimizer: ``"cpu"`` or what :func:`create_offload_config` returns; stages 1 to 3.
        offload_param: The same; stage 3.
        activation_checkpointing: DeepSpeed's section, for models that call ``deepspeed.checkpointing``.
        grad_accum_dtype: Type that gradients are added up in (``data_types.grad_accum_dtype``).
        sections: Any other keys of DeepSpeed's, which overwrite the above leaf by leaf.
        others: Any other key of ``zero_optimization``, e.g. ``overlap_comm=True``, None being DeepSpeed's own default;
            and the names of :data:`OTHER_NAMES`.

    Returns:
        A plain dict.

    Raises:
        ConfigError: everything that is wrong: unknown names with the nearest known, types and ranges, and what the
            compatibility table refuses.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and ``runtime/zero/config.py``.
    """
    given = {name: as_plain(value) for name, value in locals().items()}
    further, problems = Document(name="", data=given.pop("others")), []
    for name, real in OTHER_NAMES.items():
        if name in others and given[real] not in (None, AUTO, others[name]):
            message = f"is another name of {real}, which is {shown(given[real])}"
            problems.append(further.problem((name,), message, f"keep {real} only", "other-name"))
        given[real] = others.get(name, given[real])
    zero = {"stage": given["zero_stage"]}
    for name in ("offload_optimizer", "offload_param"):
        device = given[name]
        zero[name] = {"device": device, "pin_memory": AUTO} if isinstance(device, str) else device
    known = known_keys()["properties"][ZERO]["properties"].keys() - zero
    unknown = (name for name in others if name not in known and name not in OTHER_NAMES)
    problems += [unknown_key(further, (name,), given) for name in unknown]
    if precision not in PRECISIONS:
        fix, document = one_of(PRECISIONS, precision), Document(name="", data=given)
        problems.append(document.problem(("precision",), "no such precision", fix, "out-of-range"))
    _refuse(problems)
    if zero["stage"] is None:
        raise TypeError("create_deepspeed_config() missing 1 required keyword-only argument: 'zero_stage'")
    of_optimizer = {
        "lr": given["learning_rate"],
        **{key: given[key] for key in ("betas", "eps", "weight_decay")},
    }
    of_scheduler = {
        "warmup_min_lr": AUTO,
        "warmup_max_lr": given["learning_rate"],
        "warmup_num_steps": warmup_num_steps,
        "total_num_steps": total_num_steps,
    }
    of_zero = {**zero, **{name: value for name, value in further.data.items() if name in known}}
    made: dict[str, Any] = {
        "train_batch_size": given["train_batch_size"],
        "train_micro_batch_size_per_gpu": given["micro_batch_size"],
        "gradient_accumulation_steps": gradient_accumulation_steps,
        ZERO: {key: value for key, value in of_zero.items() if value is not None},
        "optimizer": _of_type("optimizer", optimizer, of_optimizer, given["optimizer_params"]),
        "scheduler": _of_type("scheduler", scheduler, of_scheduler, given["scheduler_params"]),
        "gradient_clipping": given["gradient_clipping"],
        **as_plain(PRECISIONS[precision]),
        "activation_checkpointing": given["activation_checkpointing"],
        "data_types": None if grad_accum_dtype is None else {"grad_accum_dtype": grad_accum_dtype},
    }
    made = {key: value for key, value in made.items() if value is not None}
    document = Document(name="create_deepspeed_config", data=made)
    over = (given["sections"] or {}).items()
    document = document.overwritten(*(((key,), value, "argument sections") for key, value in over))
    _refuse([*problems_alone(document)[0], *disagreements(document, Document(name="", data={}))])
    return normalized(document).data


def _of_type(
    section: str, kind: str | None, parameters: dict[str, Any], more: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The section of an optimizer or a schedule, with an "auto" for each parameter that it takes."""
    if kind is None:
        return None
    takes = params_of(section, kind)
    params = {}
    for key, value in parameters.items():
        is_stated = value != AUTO and key != "warmup_max_lr"
        if is_stated or (key in takes if takes is not None else key == "lr"):
            params[key] = value
    if takes is not None and "warmup_type" in takes:
        params["warmup_type"] = "linear"
    params |= more or {}
    return {"type": kind, "params": params} if params else {"type": kind}


def create_offload_config(
    offload_device: Literal["cpu", "nvme"] = "cpu",
    *,
    nvme_path: str | None = None,
    pin_memory: bool | Auto = "auto",
    **others: Any,
) -> dict[str, Any]:
    """Where ZeRO keeps what the accelerator's memory has no room for: ``offload_optimizer`` or ``offload_param``.

    It is judged with the configuration that it is put into.

    Args:
        offload_device: ``"cpu"`` is the host's memory, ``"nvme"`` files (stage 3).
        nvme_path: Folder on a local disk; needed for ``"nvme"``.
        pin_memory: Whether host memory is pinned, for faster copies; ``"auto"``: on with CUDA.
        others: Further keys of the section by DeepSpeed's names, such as ``buffer_count``, ``buffer_size``,
            ``max_in_cpu``, ``pipeline_read``, ``fast_init`` and ``ratio``; None is DeepSpeed's own default.

    Returns:
        A plain dict.

    Source: ``runtime/zero/offload_config.py`` in deepspeed 0.19.8.
    """
    section = {"device": offload_device, "nvme_path": nvme_path, "pin_memory": pin_memory, **others}
    return {name: as_plain(value) for name, value in section.items() if value is not None}


def _refuse(problems: Iterable[Problem]) -> None:
    if found := list(problems):
        raise ConfigError(found)


def problems_alone(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with a DeepSpeed JSON in every experiment that could name it.

    It is judged by ``reconcile``, on GPUs of every ability, as many as its own batch or ZeRO++ asks for.

    Returns:
        Errors, and warnings.
    """
    places: list[KeyPath] = [*((key,) for key in BATCH_KEYS), (ZERO, "zero_hpz_partition_size")]
    numbers = (ds.get(path) for path in places)
    total, micro, steps, hpz = (n if type(n) is int and 0 < n < 2**31 else None for n in numbers)
    slots, of_slot = min(hpz or 1, 2**16), (micro or 1) * (steps or 1)
    if total and (micro or steps):
        slots = max(1, total // of_slot) if micro and steps else 1
    batch = {} if total else {"global_batch_size": of_slot * slots}
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
    write_files({Path(path): deepspeed_config_text(config)}, overwrite=overwrite)


def deepspeed_config_text(config: Mapping[str, Any]) -> str:
    """The text of a DeepSpeed JSON. See :func:`save_deepspeed_config`."""
    document = Document(name="config", data=as_plain(config))
    try:
        text = json.dumps(document.data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        message = f"cannot be written as JSON: {error}"
        fix = "write strings, finite numbers, lists and mappings"
        raise ConfigError(Problem(key="config", message=message, fix=fix, code="wrong-type")) from None
    _refuse(problem for _, problem in located_problems(document))
    return text
