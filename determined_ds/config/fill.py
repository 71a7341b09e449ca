"""From a DeepSpeed JSON as it is written to the one that DeepSpeed is given: what is overwritten, and what is filled.

``"auto"`` stands for a hyperparameter, the accelerator, or DeepSpeed's own default. The same fills what is absent of
the optimizer's and the schedule's parameters. A value that nothing determines is left out, so that DeepSpeed's default
holds; where DeepSpeed has none worth having (the learning rate, the length of a schedule) it is a problem.

Some schedules never read the optimizer's learning rate: they set it, from parameters of their own. A rate that is
stated in one of the two places fills the other, so that the stated one is trained with; where both state one, the
schedule's is used, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from determined_ds.config.ds_schema import ZERO, params_of
from determined_ds.config.layout import BATCH_KEYS, FACTORS, Accelerator, Batch, Topology
from determined_ds.config.params import AUTO, OVERWRITES, SHORTHANDS, TOTAL, FitOptions, Hyperparameters
from determined_ds.documents.document import Document, KeyPath, get_path
from determined_ds.errors import NOT_GIVEN, Origin, Problem

Change = tuple[KeyPath, Any, str]  # path, value, and where it came from

# Leaf of the JSON -> names of the hyperparameter that fills it, first come first served. A leaf that is not
# listed is filled by the hyperparameter of its own name.
_RATE = ("learning_rate", "lr")
HYPERPARAMETER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "warmup_max_lr", "cycle_max_lr", "max_lr"), _RATE),
    "warmup_num_steps": ("warmup_num_steps", "warmup_steps"),
    "gradient_clipping": ("gradient_clipping", "max_grad_norm"),
    "eps": ("eps", "adam_epsilon"),
}
NEEDED = {"lr", "warmup_max_lr", "cycle_max_lr", "max_lr", "warmup_num_steps", "total_num_steps"}
# Parameters that are filled where they are absent, if the optimizer or the schedule takes them.
IF_ABSENT = {
    "optimizer": ("lr", "betas", "eps", "weight_decay"),
    "scheduler": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
}
FILLED: tuple[KeyPath, ...] = (
    *((section, "params", leaf) for section, leaves in IF_ABSENT.items() for leaf in leaves),
    ("gradient_clipping",),
)
GRADIENT_CLIPPING = 1.0  # GRADIENT_CLIPPING_DEFAULT in deepspeed 0.19.8's runtime/constants.py
PARAMS: KeyPath = ("optimizer", "params")
LR: KeyPath = (*PARAMS, "lr")
# Parameters of DeepSpeed's ``FusedAdam`` that torch's Adam does not take.
FUSED_ADAM_ONLY = ("bias_correction", "set_grad_none")
# A schedule that sets the rate -> its parameter that holds the highest rate.
# Source: deepspeed 0.19.8 runtime/lr_schedules.py; OneCycleLR and CyclicLR in torch.optim.lr_scheduler.
PEAKS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
}
# This one tries a range of rates, from its own start on; no rate that is stated elsewhere means anything to it.
RANGE_TEST, RANGE_START, RANGE_DEFAULT = "LRRangeTest", "lr_range_test_min_lr", 0.001
# Sections of the DeepSpeed JSON that a trial may build itself: null in their place removes them.
REMOVABLE: tuple[KeyPath, ...] = (("scheduler",), ("optimizer",))


# ------------------------------------------------------------------------------------------- overwrites


def leaf_paths(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value that is not a mapping with something in it."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaf_paths(value, (*path, key))
        else:
            yield (*path, key)


def overwritten(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> Document:
    """The JSON, overwritten by ``overwrite_deepspeed_args``, leaf by leaf, and by the shorthands.

    Args:
        ds: The DeepSpeed JSON.
        hyperparameters: One point, for the origins.
        hp: What was read of it.

    Source: ``overwrite_deepspeed_config`` in determined 0.38.1's ``pytorch/deepspeed``.
    """
    over = hp.overwrite_deepspeed_args
    stated: list[tuple[KeyPath, Any, KeyPath]] = [
        (path, get_path(over, path), (OVERWRITES, *path)) for path in leaf_paths(over)
    ]
    stated += [(SHORTHANDS[key], value, (key,)) for key, value in hp.shorthands.items()]
    changes = []
    for path, value, place in stated:
        origin = hyperparameters.origin(place)
        if not origin.startswith("--"):
            origin = origin.reworded(f"{place[0]}, {origin}")
        if value is None and path in REMOVABLE:
            if ds.get(path) is None:
                continue
            value = NOT_GIVEN
        changes.append((path, value, origin))
    return ds.overwritten_all(changes)


# ------------------------------------------------------------------------------------------- the learning rate


class StatedRate(NamedTuple):
    """A rate that a DeepSpeed JSON states: where, and its value; of a schedule also a list, one a parameter group."""

    path: KeyPath
    value: Any


def peak_path(ds: Document) -> KeyPath | None:
    """Where the schedule holds its highest rate; None where there is no schedule that sets the rate."""
    peak = PEAKS.get(str(ds.get(("scheduler", "type"))))
    return ("scheduler", "params", peak) if peak else None


def stated_rate(ds: Document) -> StatedRate | None:
    """The rate that a DeepSpeed JSON states and that is trained with; None where it leaves the rate open."""
    for path in (peak_path(ds), LR):
        value = ds.get(path) if path else None
        if path and (_is_number(value) or isinstance(value, list)):
            return StatedRate(path, value)
    return None


def rates_not_used(ds: Document, hyperparameters: Document) -> Iterator[Problem]:
    """A warning for each learning rate that is stated and not trained with.

    Args:
        ds: The DeepSpeed JSON as it was written.
        hyperparameters: One point.
    """
    name, value = _hyperparameter("lr", hyperparameters)
    kind, own, stated = ds.get(("scheduler", "type")), ds.get(LR), stated_rate(ds)
    if kind == RANGE_TEST:
        start: KeyPath = ("scheduler", "params", RANGE_START)
        first = ds.get(start, RANGE_DEFAULT)
        message = f"is not used: {RANGE_TEST} sets the rate, from {ds.key(start)} = {first} on"
        for document, path, rate in ((hyperparameters, (name,), value), (ds, LR, own)):
            if _is_number(rate) and rate != first:
                fix = f"remove it, or set {ds.key(start)} to {rate}"
                yield document.problem(path, message, fix, "stated-twice")
        return
    if stated is None:
        return
    highest = f"{ds.key(stated.path)} = {stated.value} ({ds.origin(stated.path)})"
    if value not in (None, stated.value):
        message = f"is not used: the DeepSpeed JSON states {highest}"
        fix = f'write "auto" there to use the hyperparameter, or remove {name}'
        yield hyperparameters.problem((name,), message, fix, "stated-twice")
    listed = stated.value if isinstance(stated.value, list) else [stated.value]
    if stated.path != LR and _is_number(own) and own not in listed:
        message = f"is not used: {kind} sets the rate, up to {highest}"
        fix = f'write "auto" for {ds.key(stated.path)} to use it, or "auto" here'
        yield ds.problem(LR, message, fix, "stated-twice")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def disagreements(ds: Document, hyperparameters: Document) -> list[Problem]:
    """Warnings of hyperparameters that would fill a value which the DeepSpeed JSON states, and differently."""
    problems = list(rates_not_used(ds, hyperparameters))
    if "stated" not in ds.worked_out:  # once, for a JSON that is filled for many points of a search
        rates = (LR, peak_path(ds))
        ds.worked_out["stated"] = [
            path for path in FILLED if path not in rates and ds.get(path) not in (None, AUTO)
        ]
    for path in ds.worked_out["stated"]:
        stated = ds.get(path)
        name, value = _hyperparameter(str(path[-1]), hyperparameters)
        if value not in (None, stated):
            message = f"is not used: the DeepSpeed JSON states {ds.key(path)} = {stated} ({ds.origin(path)})"
            fix = f'write "auto" there to use the hyperparameter, or remove {name}'
            problems.append(hyperparameters.problem((name,), message, fix, "stated-twice"))
    return problems


# ------------------------------------------------------------------------------------------- "auto"


def filled(
    ds: Document,
    hyperparameters: Document,
    fit: FitOptions,
    topology: Topology,
    batch: Batch,
    accelerator: Accelerator,
) -> tuple[Document, list[Problem]]:
    """Replace every "auto", and fill what is absent and needs a value.

    Args:
        ds: The DeepSpeed JSON.
        hyperparameters: All of them, the model's own included.
        fit: For ``total_num_steps``.
        topology: For its degrees; a bf16 pipeline accumulates gradients in fp32.
        batch: The batch sizes.
        accelerator: For precision, pinned memory and the optimizer's implementation.

    Returns:
        The filled JSON, and a problem for each "auto" that nothing determines and that DeepSpeed has no default
        for; that one is left out of the JSON.
    """
    to_fill = _to_fill(ds, topology, accelerator)
    known = [
        *_sizes(ds, hyperparameters, topology, batch),
        *tensor_parallel_values(ds, topology.model_parallel_size),
        *_experts(ds, hyperparameters),
    ]
    changes = {path: (value, origin) for path, value, origin in known}
    problems: list[Problem] = []
    for path, is_auto in to_fill.paths:
        if path in changes:
            continue
        if int in map(type, path):
            problems.append(_undetermined(to_fill.ds, path))
            continue
        value, origin = _value_for(path, to_fill, hyperparameters, fit, accelerator)
        if value is None and path[-1] == "warmup_min_lr":
            # From 0, the first steps would train nothing: WarmupLR in deepspeed 0.19.8's runtime/lr_schedules.py takes
            # two steps at warmup_min_lr.
            peak, count = (
                changes.get((*path[:-1], leaf), (to_fill.ds.get((*path[:-1], leaf)),))[0]
                for leaf in ("warmup_max_lr", "warmup_num_steps")
            )
            value, origin = 0.0, Origin("a warm-up from 0")
            if isinstance(peak, (int, float)) and isinstance(count, (int, float)) and count >= 1:
                value, origin = peak / count, Origin("warmup_max_lr / warmup_num_steps")
        if value is None and is_auto and path == (*PARAMS, "weight_decay"):
            # DeepSpeed's optimizers and torch's disagree (0.01 or 0), and a hyperparameter of 0 is lost where the web
            # UI turns an experiment into a search.
            value, origin = 0.0, Origin("no weight decay is stated")
        if value is not None:
            changes[path] = value, origin
            continue
        # Without its highest rate, WarmupDecayLR would go up to 0.001, whatever rate the trial's own optimizer has.
        is_decay = path[-1] == "warmup_max_lr" and ds.get(("scheduler", "type")) == "WarmupDecayLR"
        if (is_auto and path[-1] in NEEDED) or path[-1] == "total_num_steps" or is_decay:
            problems.append(_undetermined(to_fill.ds, path))
        if is_auto:
            changes[path] = NOT_GIVEN, ""
    done = to_fill.ds.overwritten_all((path, *change) for path, change in changes.items())
    of_accelerator = [*_torch_adam(done, accelerator), *_no_timer(done, accelerator)]
    origin = Origin(f"the accelerator: {accelerator.name}")
    done = done.overwritten_all((path, value, origin) for path, value in of_accelerator)
    return done, problems


class _ToFill(NamedTuple):
    """What is to be filled in a DeepSpeed JSON, whatever the hyperparameters are.

    Args:
        ds: It, with its precision filled.
        paths: Of what is to be filled, and whether "auto" stands there (else nothing does).
        rate: The learning rate that it states.
    """

    ds: Document
    paths: list[tuple[KeyPath, bool]]
    rate: StatedRate | None


def _to_fill(ds: Document, topology: Topology, accelerator: Accelerator) -> _ToFill:
    """Looked for once, for a JSON that is filled for many points of a search."""
    name = (topology.pipe_parallel_size > 1, accelerator)
    known: _ToFill | None = ds.worked_out.get(name)
    if known is None:
        done = _with_precision(ds, topology, accelerator)
        paths = [(path, True) for path in _auto_paths(done.data)]
        absent: list[KeyPath] = [("gradient_clipping",)] if ds.get(("gradient_clipping",)) is None else []
        for section, leaves in IF_ABSENT.items():
            kind = done.get((section, "type"))
            takes = params_of(section, kind)
            if takes is None:  # torch's own
                takes = ["lr"] if section == "optimizer" else []
            for leaf in leaves if isinstance(kind, str) else ():
                if leaf in takes and done.get((section, "params", leaf)) is None:
                    absent.append((section, "params", leaf))
        paths += [(path, False) for path in absent]
        paths.sort(key=lambda item: item[0][-1] == "warmup_min_lr")  # which depends on where the warm-up ends
        known = ds.worked_out[name] = _ToFill(done, paths, stated_rate(ds))
    return known


def _auto_paths(data: dict[str, Any] | list[Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, (dict, list)):
            yield from _auto_paths(value, (*path, key))
        elif value == AUTO:
            yield (*path, key)


def _hyperparameter(leaf: str, hyperparameters: Document) -> tuple[str, Any]:
    """Name and value of the hyperparameter that fills a leaf; the value is None where there is none."""
    names = HYPERPARAMETER_NAMES.get(leaf, (leaf,))
    for name in names:
        value = hyperparameters.data.get(name)
        if value is not None and value != AUTO:
            return name, value
    return names[0], None


def _value_for(
    path: KeyPath, to_fill: _ToFill, hyperparameters: Document, fit: FitOptions, accelerator: Accelerator
) -> tuple[Any, Origin]:
    """What fills a leaf, and its origin; None where nothing does."""
    leaf, ds, rate = str(path[-1]), to_fill.ds, to_fill.rate
    if (
        rate is not None and path in (LR, peak_path(ds)) and _is_number(rate.value)
    ):  # stated in the other place
        origin = ds.origin(rate.path)
        return rate.value, origin.reworded(f"{ds.key(rate.path)}, {origin}")
    if leaf == "pin_memory":
        return accelerator.name == "cuda", Origin(f"the accelerator: {accelerator.name}")
    name, value = _hyperparameter(leaf, hyperparameters)
    if leaf == "total_num_steps" and fit.max_length and fit.max_length.unit == "batches":
        name, value = "fit.max_length", fit.max_length.value
    elif leaf == "betas" and value is None:
        pair = [hyperparameters.get((each,)) for each in ("adam_beta1", "adam_beta2")]
        if None not in pair:
            name, value = "adam_beta1", pair
    if value is not None:
        origin = hyperparameters.origin(tuple(name.split(".")))
        return value, origin.reworded(f"{name}, {origin}")
    if path == ("gradient_clipping",):  # DeepSpeed clips by default; written out, so that it is seen
        return GRADIENT_CLIPPING, Origin("DeepSpeed's default")
    return None, Origin()


def _undetermined(ds: Document, path: KeyPath) -> Problem:
    name = HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),))[0]
    fix = f"add the hyperparameter {name}, or write a number"
    if path[-1] == "total_num_steps":
        fix = "state fit.max_length in batches, or write the number of steps"
    if isinstance(path[-1], int):
        fix = '"auto" stands for a whole value: write the list, or "auto" in its place'
    missing = "" if ds.get(path) == AUTO else "missing, and "
    return ds.problem(path, f"{missing}nothing says what it should be", fix, "auto-undetermined")


def _sizes(ds: Document, document: Document, layout: Topology, batch: Batch) -> Iterator[Change]:
    """The batch sizes that the JSON leaves open, and the ranks that share a sequence, by which replicas are counted."""
    place = document.origin((TOTAL,))
    for key, name in BATCH_KEYS.items():
        if ds.get((key,)) not in (None, AUTO):
            continue
        factors = " x ".join(
            f"{said} {getattr(batch, other)}" for other, said in FACTORS.items() if other != name
        )
        derived = f"derived: {TOTAL} {batch.global_batch_size} / ({factors})"
        if name == TOTAL:
            is_stated = document.get((TOTAL,)) not in (None, AUTO)
            derived = f"{TOTAL}, {place}" if is_stated else f"derived: {factors}"
        yield (key,), getattr(batch, name), place.reworded(derived)
    key, size = "sequence_parallel_size", layout.sequence_parallel_size
    if size > 1 and ds.get((key,)) in (None, AUTO):
        place = document.origin((key,))
        yield (key,), size, place.reworded(f"hyperparameters.{key}, {place}")


def tensor_parallel_values(ds: Document, size: int, *, everywhere: bool = False) -> list[Change]:
    """What a DeepSpeed JSON leaves open of its section ``tensor_parallel``, which agrees with ``model_parallel_size``.

    ``vocab_parallel_lm_head`` is off unless it is stated: DeepSpeed would turn it on where the output layer is tied to
    the embedding, and the model would then return each rank its own part of the logits.

    Args:
        ds: The JSON.
        size: ``model_parallel_size``.
        everywhere: Fill it where there is no such section, too.

    Source: deepspeed 0.19.8 ``DeepSpeedEngine._apply_autotp_partitioning`` in ``runtime/engine.py``,
    ``auto_vocab_parallel_lm_head``.
    """
    section = ds.get(("tensor_parallel",))
    if not isinstance(section, dict) and not (everywhere and section is None):
        return []
    degree, head = ("tensor_parallel", "autotp_size"), ("tensor_parallel", "vocab_parallel_lm_head")
    changes: list[Change] = []
    stated = ds.get(degree)
    if stated in (None, AUTO):
        stated = size
        changes.append((degree, size, "model_parallel_size"))
    if isinstance(stated, int) and stated > 1 and ds.get(head) in (None, AUTO):
        changes.append((head, False, "the loss is computed from whole logits"))
    return changes


def _experts(ds: Document, hyperparameters: Document) -> Iterator[Change]:
    """What ``expert_parallel_size`` fills. Without it, an ``"auto"`` in the section is off."""
    size = hyperparameters.get(("expert_parallel_size",))
    is_set = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    for key, value in (("enabled", is_set), ("autoep_size", size if is_set else 1)):
        if ds.get(("expert_parallel", key)) in ((None, AUTO) if is_set else (AUTO,)):
            yield ("expert_parallel", key), value, "expert_parallel_size"


def _with_precision(ds: Document, topology: Topology, accelerator: Accelerator) -> Document:
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
    if is_pipeline and ds.get((ZERO, "stage")) and ds.get(dtype) in (None, AUTO):
        ds = ds.overwritten(dtype, "fp32", "bf16 pipelines accumulate in fp32")
    return ds


def _torch_adam(ds: Document, accelerator: Accelerator) -> Iterator[tuple[KeyPath, bool]]:
    """Torch's own Adam, so that nothing has to be compiled before the first step; on GPUs the fused one.

    DeepSpeed's ``FusedAdam`` is built by nvcc at its first use, and few machines with GPUs have that compiler. What
    is stated stays, and so does what only DeepSpeed's takes: its own optimizer on the CPU for an offloaded state, and
    the parameters of ``FusedAdam`` that torch does not know. Muon steps all but matrices by the same Adam.

    Source: ``get_optimizer_configuration`` in deepspeed 0.19.8's ``runtime/engine.py``; ``Adam.__init__`` in torch's
    ``optim/adam.py`` for what ``fused`` excludes.
    """
    kind, stated = str(ds.get(("optimizer", "type"), "")).lower(), ds.get(PARAMS) or {}
    if kind not in ("adam", "adamw", "muon") or stated.get("torch_adam") is not None:
        return
    on_gpu = accelerator.name != "cpu"
    is_offloaded = ds.get((ZERO, "offload_optimizer", "device")) in ("cpu", "nvme")
    if on_gpu and (is_offloaded or any(name in stated for name in FUSED_ADAM_ONLY)):
        return
    yield (*PARAMS, "torch_adam"), True
    excluded = stated.get("foreach") or stated.get("differentiable") or stated.get("fused") is not None
    if on_gpu and kind != "muon" and not excluded:
        yield (*PARAMS, "fused"), True


def _no_timer(ds: Document, accelerator: Accelerator) -> Iterator[tuple[KeyPath, bool]]:
    """On GPUs no throughput timer unless it is asked for: it waits for the device twice a micro-batch.

    ``steps_per_print`` asks for it, since what it prints is timed so; ``samples_per_second`` is measured by the loop.

    Source: ``ThroughputTimer`` in deepspeed 0.19.8's ``utils/timer.py``, which is on by default.
    """
    is_asked_for = ds.get(("steps_per_print",)) or ds.get(("timers", "throughput")) is not None
    if accelerator.name != "cpu" and not is_asked_for:
        yield ("timers", "throughput", "enabled"), False
