"""DeepSpeed configurations made from Python: the arguments have DeepSpeed's names, and are checked as a file is.

``create_deepspeed_config`` has no rules of its own: it builds the mapping and hands it to ``reconcile``, so that it
refuses exactly what a run would refuse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

from typing_extensions import Required, Unpack

from determined_ds.config.aliases import ARGUMENTS, OFFLOAD_ARGUMENTS
from determined_ds.config.deepspeed.alone import problems_alone
from determined_ds.config.deepspeed.arguments import takes_other_names
from determined_ds.config.deepspeed.files import plain
from determined_ds.config.deepspeed.learning_rate import rates_not_used
from determined_ds.config.deepspeed.normalized import known_keys, normalized, params_of
from determined_ds.config.facts import ZERO
from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import Document, KeyPath, one_of, words
from determined_ds.documents.values import kind_of
from determined_ds.errors import ConfigError, Problem

Auto = Literal["auto"]
Offload = Literal["cpu", "nvme"] | Mapping[str, Any] | bool | None

PRECISIONS: dict[str, dict[str, dict[str, Any]]] = {
    AUTO: {"bf16": {"enabled": AUTO}},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "fp32": {"bf16": {"enabled": False}},
}
OFFLOADS = ("offload_optimizer", "offload_param")


class DeepSpeedArguments(TypedDict, total=False):
    """Arguments of :func:`create_deepspeed_config`. None, the default of most, leaves a key to DeepSpeed's default.

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
    """

    zero_stage: Required[int]
    train_batch_size: int | Auto
    micro_batch_size: int | Auto
    gradient_accumulation_steps: int | Auto
    precision: Literal["auto", "bf16", "fp16", "fp32"]
    optimizer: str | Literal[False] | None
    learning_rate: float | Auto
    betas: Sequence[float] | Auto
    eps: float | Auto
    weight_decay: float | Auto
    optimizer_params: Mapping[str, Any] | None
    scheduler: str | Literal[False] | None
    warmup_num_steps: int | Auto
    total_num_steps: int | Auto
    scheduler_params: Mapping[str, Any] | None
    gradient_clipping: float | Auto
    offload_optimizer: Offload
    offload_param: Offload
    nvme_path: str | None
    zero_hpz_partition_size: int | None
    zero_quantized_weights: bool | None
    zero_quantized_gradients: bool | None
    overlap_comm: bool | None
    contiguous_gradients: bool | None
    reduce_bucket_size: int | None
    allgather_bucket_size: int | None
    stage3_prefetch_bucket_size: int | None
    stage3_param_persistence_threshold: int | None
    stage3_gather_16bit_weights_on_model_save: bool | None
    activation_checkpointing: Mapping[str, Any] | Literal[False] | None
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None
    sections: Mapping[str, Any] | None


WITH_AUTO = words("""train_batch_size micro_batch_size gradient_accumulation_steps precision learning_rate betas eps
    weight_decay warmup_num_steps total_num_steps gradient_clipping""")
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(DeepSpeedArguments.__annotations__),
    **dict.fromkeys(WITH_AUTO, AUTO),
    "optimizer": "AdamW",
    "scheduler": "WarmupLR",
}


@takes_other_names(ARGUMENTS, known=DEFAULTS)
def create_deepspeed_config(**arguments: Unpack[DeepSpeedArguments]) -> dict[str, Any]:
    """A DeepSpeed configuration, as :func:`save_deepspeed_config` writes and a run reads it.

    ``"auto"`` is filled once it is known what will run: batch sizes from ``global_batch_size`` and the slots, the
    precision from the accelerator, the rest from hyperparameters. None leaves a key to DeepSpeed's own default.

    Names that other documents use are accepted too where they mean the same (``stage``, ``lr``, ``bf16=True``, see
    ``ARGUMENTS`` in :mod:`determined_ds.config.aliases`); any other name is refused.

    Args:
        arguments: ``zero_stage`` (0 to 3) is required; the others, with units and ranges, are those of
            :class:`DeepSpeedArguments`.

    Returns:
        A plain dict.

    Raises:
        ConfigError: everything that is wrong: unknown keys with the nearest known, types and ranges, and what the
            compatibility table refuses.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and ``runtime/zero/config.py``.
    """
    if "zero_stage" not in arguments:
        raise TypeError("create_deepspeed_config() missing 1 required keyword-only argument: 'zero_stage'")
    given = _switched(plain({**DEFAULTS, **arguments}))
    stated = Document(name="", data=given)
    _refuse(_no_mappings(stated))
    document = _document(_leaves(given))
    for key, value in (given["sections"] or {}).items():
        document = document.overwritten((key,), value, "argument sections")
    document = _with_nvme_path(document, given["nvme_path"])
    rates = rates_not_used(document, "", None, document)
    _refuse(
        [
            *_precision_problems(stated),
            *_nvme_problems(stated, document),
            *problems_alone(document)[0],
            *rates,
        ]
    )
    return normalized(document).data


@takes_other_names(OFFLOAD_ARGUMENTS)
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
    _check_offload(section)
    return section


def _check_offload(section: dict[str, Any]) -> None:
    known = known_keys()["keys"][ZERO]["keys"]
    # Where both would accept it, it is checked as parameters.
    as_what = next(
        (what for what in reversed(OFFLOADS) if section.keys() <= known[what]["keys"].keys()), None
    )
    if as_what is None:
        raise ConfigError(_of_two_kinds(section))
    prefix = f"{ZERO}.{as_what}."
    found, _ = problems_alone(Document(name="", data={ZERO: {"stage": 3, as_what: section}}))
    _refuse(
        dataclasses.replace(
            problem,
            key=problem.key.removeprefix(prefix),
            origin="",
            fix=problem.fix.replace(prefix, ""),
        )
        for problem in found
    )


def _refuse(problems: Iterable[Problem]) -> None:
    found = list(problems)
    if found:
        raise ConfigError(found)


# ------------------------------------------------------------------------------------ the arguments of the first

# Key -> argument, in the order of the templates. What is None is left out.
BEFORE_PARAMS: dict[KeyPath, str] = {
    ("train_batch_size",): "train_batch_size",
    ("train_micro_batch_size_per_gpu",): "micro_batch_size",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    (ZERO, "stage"): "zero_stage",
    **{
        (ZERO, name): name
        for name in [
            "offload_optimizer",
            "offload_param",
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
        ]
    },
}
AFTER_PARAMS: dict[KeyPath, str] = {
    ("gradient_clipping",): "gradient_clipping",
    ("activation_checkpointing",): "activation_checkpointing",
    ("data_types", "grad_accum_dtype"): "grad_accum_dtype",
}
Leaves = dict[KeyPath, tuple[str, Any]]
# Arguments that may be switched off, or on -> what that stands for.
SWITCHES: dict[str, dict[bool, Any]] = {
    **{what: {True: "cpu", False: None} for what in OFFLOADS},
    **{name: {False: None} for name in ("optimizer", "scheduler", "activation_checkpointing")},
    "gradient_clipping": {False: 0.0},
}


def _switched(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with what True and False stand for."""
    return {
        name: SWITCHES.get(name, {}).get(value, value) if isinstance(value, bool) else value
        for name, value in given.items()
    }


def _document(leaves: Leaves) -> Document:
    document = Document(name="create_deepspeed_config", data={})
    for path, (argument, value) in leaves.items():
        document = document.overwritten(path, value, f"argument {argument}")
    return document


def _leaves(given: Mapping[str, Any]) -> Leaves:
    """Key path -> the argument that says it, and its value."""
    leaves = {path: (name, given[name]) for path, name in BEFORE_PARAMS.items()}
    for what in OFFLOADS:
        if isinstance(given[what], str):
            leaves[ZERO, what] = (what, {"device": given[what], "pin_memory": AUTO})
    leaves |= _params_leaves(given)
    leaves |= {path: (name, given[name]) for path, name in AFTER_PARAMS.items()}
    for section, value in PRECISIONS.get(str(given["precision"]), {}).items():
        leaves[section,] = ("precision", value)
    return {path: (name, value) for path, (name, value) in leaves.items() if value is not None}


def _params_leaves(given: Mapping[str, Any]) -> Leaves:
    """Of the optimizer and the schedule; "auto" where the chosen one takes that parameter."""
    names = {
        "optimizer": {
            "lr": "learning_rate",
            **{name: name for name in ("betas", "eps", "weight_decay")},
        },
        "scheduler": {
            "warmup_min_lr": "",
            "warmup_max_lr": "learning_rate",
            **{name: name for name in ("warmup_num_steps", "total_num_steps")},
        },
    }
    leaves: Leaves = {}
    for section, arguments in names.items():
        kind = given[section]
        if kind is None:
            continue
        leaves[section, "type"] = (section, kind)
        takes = params_of(section, kind)
        for key, argument in arguments.items():
            value = given.get(argument, AUTO)
            stated = value != AUTO and key != "warmup_max_lr"
            if stated or (key in takes if takes is not None else key == "lr"):
                leaves[section, "params", key] = (argument or section, value)
        if takes is not None and "warmup_type" in takes:
            leaves[section, "params", "warmup_type"] = (section, "linear")
        for key, value in (given[f"{section}_params"] or {}).items():
            leaves[section, "params", key] = (f"{section}_params", value)
    return leaves


# ------------------------------------------------------------------------------------------------ what is refused


def _no_mappings(stated: Document) -> Iterator[Problem]:
    fixes = {
        **dict.fromkeys(
            ("optimizer_params", "scheduler_params", "sections"), 'write a mapping, e.g. {"eps": 1e-6}'
        ),
        **dict.fromkeys(OFFLOADS, 'write "cpu", "nvme", or what create_offload_config returns'),
    }
    for name, fix in fixes.items():
        value = stated.get((name,))
        if value is None or isinstance(value, dict) or (name in OFFLOADS and isinstance(value, str)):
            continue
        yield stated.problem((name,), f"must be a mapping, not {kind_of(value)}", fix, "wrong-type")


def _precision_problems(stated: Document) -> Iterator[Problem]:
    precision = stated.get(("precision",))
    if not isinstance(precision, str) or precision not in PRECISIONS:
        fix = one_of(PRECISIONS, precision)
        yield stated.problem(("precision",), "no such precision", fix, "out-of-range")


def _on_nvme(document: Document) -> list[str]:
    return [what for what in OFFLOADS if document.get((ZERO, what, "device")) == "nvme"]


def _with_nvme_path(document: Document, nvme_path: str | None) -> Document:
    for what in _on_nvme(document) if nvme_path is not None else ():
        path: KeyPath = (ZERO, what, "nvme_path")
        if document.get(path) is None:
            document = document.overwritten(path, nvme_path, "argument nvme_path")
    return document


def _nvme_problems(stated: Document, document: Document) -> Iterator[Problem]:
    if stated.get(("nvme_path",)) is not None and not _on_nvme(document):
        fix = 'add offload_optimizer="nvme" or offload_param="nvme", or leave nvme_path out'
        yield stated.problem(("nvme_path",), "nothing is offloaded to nvme", fix, "offload-nvme-path")


def _of_two_kinds(section: Mapping[str, Any]) -> Problem:
    known = {what: known_keys()["keys"][ZERO]["keys"][what]["keys"].keys() for what in OFFLOADS}
    optimizer, param = (
        [key for key in section if key in known[what] and key not in known[other]]
        for what, other in (OFFLOADS, OFFLOADS[::-1])
    )
    message = f"is of offload_param only, and {', '.join(optimizer)} of offload_optimizer only"
    stated = Document(name="", data=dict(section))
    return stated.problem((param[0],), message, "make one configuration for each of the two", "offload-kinds")
