"""What ``"auto"`` means in a DeepSpeed JSON: a hyperparameter, the accelerator, or DeepSpeed's own default.

The same fills what is absent of the optimizer's and the schedule's parameters. A value that nothing determines is
left out, so that DeepSpeed's default holds; where DeepSpeed has none worth having (the learning rate, the length
of a schedule) it is a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.instruments import switch_on
from determined_ds.config.deepspeed.learning_rate import (
    LR,
    STATED_TWICE,
    StatedRate,
    peak_path,
    rate_for,
    rates_not_used,
    stated_rate,
    states_rate,
)
from determined_ds.config.deepspeed.normalized import known_keys
from determined_ds.config.fit_options import FitOptions
from determined_ds.config.numbers import AUTO
from determined_ds.config.topology import Topology
from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import NOT_GIVEN, Origin, Problem

# Leaf of the JSON -> names of the hyperparameter that fills it, first come first served. A leaf that is not
# listed is filled by the hyperparameter of its own name.
HYPERPARAMETER_NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "lr"),
    "warmup_max_lr": ("learning_rate", "lr"),
    "cycle_max_lr": ("learning_rate", "lr"),
    "max_lr": ("learning_rate", "lr"),
    "warmup_num_steps": ("warmup_num_steps", "warmup_steps"),
    "gradient_clipping": ("gradient_clipping", "max_grad_norm"),
    "eps": ("eps", "adam_epsilon"),
}
# What "auto" is without a hyperparameter: DeepSpeed's optimizers and torch's disagree (0.01 or 0), and a
# hyperparameter of 0 is lost where the web UI turns an experiment into a search.
WEIGHT_DECAY = 0.0
# ``GRADIENT_CLIPPING_DEFAULT`` in deepspeed 0.19.8's ``runtime/constants.py``.
GRADIENT_CLIPPING = 1.0
PARAMS: KeyPath = ("optimizer", "params")
DECAY: KeyPath = (*PARAMS, "weight_decay")
# Parameters of DeepSpeed's ``FusedAdam`` that torch's Adam does not take.
FUSED_ADAM_ONLY = ("bias_correction", "set_grad_none")
NEEDED = {"lr", "warmup_max_lr", "cycle_max_lr", "max_lr", "warmup_num_steps", "total_num_steps"}
ENDS = ("warmup_max_lr", "warmup_num_steps")  # where a warm-up ends
# Parameters that are filled where they are absent, if the optimizer or the schedule takes them.
IF_ABSENT = {
    "optimizer": ("lr", "betas", "eps", "weight_decay"),
    "scheduler": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
}
FILLED: tuple[KeyPath, ...] = (
    *((section, "params", leaf) for section, leaves in IF_ABSENT.items() for leaf in leaves),
    ("gradient_clipping",),
)


def fill_what_is_known(
    ds: Document,
    hyperparameters: Document,
    fit: FitOptions,
    topology: Topology,
    accelerator: Accelerator,
    *,
    known: Sequence[Change] = (),
) -> tuple[Document, list[Problem]]:
    """Replace every "auto", and fill what is absent and needs a value.

    Args:
        ds: The DeepSpeed JSON.
        hyperparameters: All of them, the model's own included.
        fit: For ``total_num_steps``.
        topology: A bf16 pipeline accumulates gradients in fp32.
        accelerator: For precision, pinned memory and the optimizer's implementation.
        known: Values that are known already, the batch sizes; they overwrite the JSON first.

    Returns:
        The filled JSON, and a problem for each "auto" that nothing determines and that DeepSpeed has no default
        for; that one is left out of the JSON.
    """
    to_fill = _to_fill(ds, topology, accelerator)
    problems: list[Problem] = []
    changes = {path: (value, origin) for path, value, origin in known}
    for path, is_auto in to_fill.paths:
        if path in changes:
            continue
        if int in map(type, path):
            problems.append(_undetermined(to_fill.ds, path))
            continue
        value, origin = rate_for(path, to_fill.ds, to_fill.rate) or _value_for(
            path, hyperparameters, fit, accelerator
        )
        if value is None and path[-1] == "warmup_min_lr":
            ends = [
                changes.get((*path[:-1], leaf), (to_fill.ds.get((*path[:-1], leaf)),))[0] for leaf in ENDS
            ]
            value, origin = _first_warmup_lr(*ends)
        if value is None and is_auto and path == DECAY:
            value, origin = WEIGHT_DECAY, "no weight decay is stated"
        if value is not None:
            changes[path] = value, origin
            continue
        if (is_auto and path[-1] in NEEDED) or _is_missed(path, ds):
            problems.append(_undetermined(to_fill.ds, path))
        if is_auto:
            changes[path] = NOT_GIVEN, ""
    filled = to_fill.ds.overwritten_all((path, *change) for path, change in changes.items())
    filled = switch_on(_fill_optimizer(filled, accelerator), hyperparameters)
    return _fill_timers(filled, accelerator), problems


Change = tuple[KeyPath, Any, str]


class _ToFill(NamedTuple):
    """What is to be filled in a DeepSpeed JSON, whatever the hyperparameters are.

    Args:
        ds: It, with its precision filled.
        paths: Of what is to be filled, and whether "auto" stands there (else nothing does).
        rate: The learning rate that it states.
    """

    ds: Document
    paths: Sequence[tuple[KeyPath, bool]]
    rate: StatedRate | None


def _to_fill(ds: Document, topology: Topology, accelerator: Accelerator) -> _ToFill:
    """Looked for once, for a JSON that is filled for many points of a search."""
    name = (topology.pipe_parallel_size > 1, accelerator)
    known: _ToFill | None = ds.worked_out.get(name)
    if known is None:
        filled = _fill_precision(ds, topology, accelerator)
        paths = [(path, True) for path in _auto_paths(filled.data)]
        paths += [(path, False) for path in _absent_paths(filled)]
        # Where a warm-up starts depends on where it ends.
        paths.sort(key=lambda item: item[0][-1] == "warmup_min_lr")
        known = ds.worked_out[name] = _ToFill(filled, paths, stated_rate(ds))
    return known


def _is_missed(path: KeyPath, ds: Document) -> bool:
    """Whether an absent value must be stated, since DeepSpeed's default would be wrong.

    ``WarmupDecayLR`` would go up to 0.001, whatever rate the trial's own optimizer has.
    """
    return path[-1] == "total_num_steps" or (
        path[-1] == "warmup_max_lr" and ds.get(("scheduler", "type")) == "WarmupDecayLR"
    )


def disagreements(ds: Document, hyperparameters: Document) -> list[Problem]:
    """Hyperparameters that would fill a value which the DeepSpeed JSON states, and differently. Warnings."""
    problems: list[Problem] = []
    if states_rate(ds):
        problems += rates_not_used(ds, *_hyperparameter("lr", hyperparameters), hyperparameters)
    if "stated" not in ds.worked_out:  # once, for a JSON that is filled for many points of a search
        rates = (LR, peak_path(ds))
        ds.worked_out["stated"] = [
            path for path in FILLED if path not in rates and ds.get(path) not in (None, AUTO)
        ]
    for path in ds.worked_out["stated"]:
        stated = ds.get(path)
        name, value = _hyperparameter(str(path[-1]), hyperparameters)
        if value in (None, stated):
            continue
        message = f"is not used: the DeepSpeed JSON states {ds.key(path)} = {stated} ({ds.origin(path)})"
        fix = f'write "auto" there to use the hyperparameter, or remove {name}'
        problems.append(hyperparameters.problem((name,), message, fix, STATED_TWICE))
    return problems


def _auto_paths(data: dict[str, Any] | list[Any], path: KeyPath = ()) -> list[KeyPath]:
    found: list[KeyPath] = []
    items: Iterable[tuple[str | int, Any]] = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        if isinstance(value, (dict, list)):
            found += _auto_paths(value, (*path, key))
        elif value == AUTO:
            found.append((*path, key))
    return found


def _absent_paths(ds: Document) -> list[KeyPath]:
    found: list[KeyPath] = [] if ds.get(("gradient_clipping",)) is not None else [("gradient_clipping",)]
    for section, leaves in IF_ABSENT.items():
        kind = ds.get((section, "type"))
        if not isinstance(kind, str):
            continue
        takes = known_keys()[f"{section}_params"].get(kind.lower() if section == "optimizer" else kind)
        if takes is None:  # torch's own
            takes = ["lr"] if section == "optimizer" else []
        found += [
            (section, "params", leaf)
            for leaf in leaves
            if leaf in takes and ds.get((section, "params", leaf)) is None
        ]
    return found


def _hyperparameter(leaf: str, hyperparameters: Document) -> tuple[str, Any]:
    """Name and value of the hyperparameter that fills a leaf; the value is None where there is none."""
    names = HYPERPARAMETER_NAMES.get(leaf, (leaf,))
    for name in names:
        value = hyperparameters.data.get(name)
        if value is not None and value != AUTO:
            return name, value
    return names[0], None


def _value_for(
    path: KeyPath, hyperparameters: Document, fit: FitOptions, accelerator: Accelerator
) -> tuple[Any, str]:
    leaf = str(path[-1])
    if leaf == "pin_memory":
        return accelerator.name == "cuda", f"the accelerator: {accelerator.name}"
    if leaf == "total_num_steps" and fit.max_length and fit.max_length.unit == "batches":
        return fit.max_length.value, _stated("fit.max_length", hyperparameters, ("fit", "max_length"))
    name, value = _hyperparameter(leaf, hyperparameters)
    if value is not None:
        return value, _stated(name, hyperparameters, (name,))
    if leaf == "betas":
        pair = [hyperparameters.get((name,)) for name in ("adam_beta1", "adam_beta2")]
        if None not in pair:
            return pair, _stated("adam_beta1", hyperparameters, ("adam_beta1",))
    if path == ("gradient_clipping",):  # DeepSpeed clips by default; written out, so that it is seen
        return GRADIENT_CLIPPING, "DeepSpeed's default"
    return None, ""


def _stated(name: str, hyperparameters: Document, path: KeyPath) -> Origin:
    origin = hyperparameters.origin(path)
    return origin.reworded(f"{name}, {origin}")


def _first_warmup_lr(peak: Any, count: Any) -> tuple[float, str]:
    """Where a warm-up starts: at its first step's share of the peak. From 0, the first steps would train nothing.

    Source: ``WarmupLR`` in deepspeed 0.19.8's ``runtime/lr_schedules.py`` takes two steps at ``warmup_min_lr``.
    """
    if isinstance(peak, (int, float)) and isinstance(count, (int, float)) and count >= 1:
        return peak / count, "warmup_max_lr / warmup_num_steps"
    return 0.0, "a warm-up from 0"


def _undetermined(ds: Document, path: KeyPath) -> Problem:
    name = HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),))[0]
    fix = f"add the hyperparameter {name}, or write a number"
    if path[-1] == "total_num_steps":
        fix = "state fit.max_length in batches, or write the number of steps"
    if isinstance(path[-1], int):
        fix = '"auto" stands for a whole value: write the list, or "auto" in its place'
    missing = "" if ds.get(path) == AUTO else "missing, and "
    return ds.problem(path, f"{missing}nothing says what it should be", fix, "auto-undetermined")


def _fill_precision(ds: Document, topology: Topology, accelerator: Accelerator) -> Document:
    """bf16 "auto" is on where the accelerator is made for it; else fp16 "auto" where that is all it has."""
    origin = f"the accelerator: {accelerator.name}"
    for section in ("bf16", "fp16"):
        if ds.get((section,)) == AUTO:
            ds = ds.overwritten((section,), {"enabled": AUTO}, origin)
    stated_fp16 = ds.get(("fp16", "enabled"))
    if ds.get(("bf16", "enabled")) == AUTO:
        on = accelerator.bf16 and stated_fp16 is not True
        ds = ds.overwritten(("bf16", "enabled"), on, origin)
    if stated_fp16 == AUTO:
        on = accelerator.name == "cuda" and not ds.get(("bf16", "enabled"), False)
        ds = ds.overwritten(("fp16", "enabled"), on, origin)
    dtype: KeyPath = ("data_types", "grad_accum_dtype")
    is_pipeline = topology.pipe_parallel_size > 1 and ds.get(("bf16", "enabled")) is True
    # Without ZeRO, DeepSpeed accumulates in what the model computes in, and refuses anything else.
    if is_pipeline and ds.get(("zero_optimization", "stage")) and ds.get(dtype) in (None, AUTO):
        ds = ds.overwritten(dtype, "fp32", "bf16 pipelines accumulate in fp32")
    return ds


def _fill_optimizer(ds: Document, accelerator: Accelerator) -> Document:
    """Torch's own Adam, so that nothing has to be compiled before the first step; on GPUs the fused one.

    DeepSpeed's ``FusedAdam`` is built by nvcc at its first use, and few machines with GPUs have that compiler. What
    is stated stays, and so does what only DeepSpeed's takes: its own optimizer on the CPU for an offloaded state, and
    the parameters of ``FusedAdam`` that torch does not know. Muon steps all but matrices by the same Adam.

    Source: ``get_optimizer_configuration`` in deepspeed 0.19.8's ``runtime/engine.py``; ``Adam.__init__`` in torch's
    ``optim/adam.py`` for what ``fused`` excludes.
    """
    kind = str(ds.get(("optimizer", "type"), "")).lower()
    if kind not in ("adam", "adamw", "muon") or ds.get((*PARAMS, "torch_adam")) is not None:
        return ds
    origin = f"the accelerator: {accelerator.name}"
    if accelerator.name == "cpu":
        return ds.overwritten((*PARAMS, "torch_adam"), True, origin)
    stated = ds.get(PARAMS) or {}
    offload = ds.get(("zero_optimization", "offload_optimizer", "device"))
    if offload in ("cpu", "nvme") or any(name in stated for name in FUSED_ADAM_ONLY):
        return ds
    ds = ds.overwritten((*PARAMS, "torch_adam"), True, origin)
    if (
        kind != "muon"
        and stated.get("fused") is None
        and not stated.get("foreach")
        and not stated.get("differentiable")
    ):
        ds = ds.overwritten((*PARAMS, "fused"), True, origin)
    return ds


def _fill_timers(ds: Document, accelerator: Accelerator) -> Document:
    """On GPUs no throughput timer unless it is asked for: it waits for the device twice a micro-batch.

    ``steps_per_print`` asks for it, since what it prints is timed so; ``samples_per_second`` is measured by the loop.

    Source: ``ThroughputTimer`` in deepspeed 0.19.8's ``utils/timer.py``, which is on by default.
    """
    if (
        accelerator.name == "cpu"
        or ds.get(("steps_per_print",))
        or ds.get(("timers", "throughput")) is not None
    ):
        return ds
    return ds.overwritten(("timers", "throughput", "enabled"), False, f"the accelerator: {accelerator.name}")
