"""From a DeepSpeed JSON as it is written to the one that DeepSpeed is given: what is overwritten, and what is filled.

``"auto"`` stands for a hyperparameter, the accelerator, or DeepSpeed's own default. The same fills what is absent of
the optimizer's and the schedule's parameters. A value that nothing determines is left out, so that DeepSpeed's default
holds; where DeepSpeed has none worth having (the learning rate, the length of a schedule) it is a problem.

Some schedules never read the optimizer's learning rate: they set it, from parameters of their own. A rate that is
stated in one of the two places fills the other, so that the stated one is trained with; where both state one, the
schedule's is used, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from determined_ds.config.ds_schema import ZERO, params_of
from determined_ds.config.layout import BATCH_KEYS, REPLICAS, Accelerator, Batch, Topology
from determined_ds.config.params import AUTO, OVERWRITES, SHORTHANDS, TOTAL, FitOptions, Hyperparameters
from determined_ds.documents.document import Document, KeyPath, get_path
from determined_ds.errors import NOT_GIVEN, Origin, Problem

Change = tuple[KeyPath, Any, str]  # path, value, and where it came from

# Leaf of the JSON -> names of the hyperparameter that fills it, first come first served. A leaf that is not
# listed is filled by the hyperparameter of its own name.
_RATES = ("lr", "warmup_max_lr", "cycle_max_lr", "max_lr", "lr_range_test_min_lr")
HYPERPARAMETER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_RATES, ("learning_rate", "lr")),
    "warmup_num_steps": ("warmup_num_steps", "warmup_steps"),
    "gradient_clipping": ("gradient_clipping", "max_grad_norm"),
    "eps": ("eps", "adam_epsilon"),
}
NEEDED = {*_RATES, "warmup_num_steps"}
# Parameters that are filled where they are absent, if the optimizer or the schedule takes them.
IF_ABSENT = {
    "optimizer": ("lr", "betas", "eps", "weight_decay"),
    "scheduler": ("warmup_max_lr", "lr_range_test_min_lr", "warmup_num_steps", "total_num_steps"),
}
PARAMS: KeyPath = ("optimizer", "params")
LR: KeyPath = (*PARAMS, "lr")
CLIPPING: KeyPath = ("gradient_clipping",)
# DeepSpeed clips by default, which is written out, so that it is seen (GRADIENT_CLIPPING_DEFAULT in deepspeed 0.19.8's
# runtime/constants.py). Its optimizers and torch's disagree about the weight decay (0.01 or 0), and a hyperparameter of
# 0 is lost where the web UI turns an experiment into a search; only "auto" is filled so.
DEFAULTS: dict[KeyPath, tuple[float, Origin]] = {
    CLIPPING: (1.0, Origin("DeepSpeed's default")),
    (*PARAMS, "weight_decay"): (0.0, Origin("no weight decay is stated")),
}
# Parameters of DeepSpeed's ``FusedAdam`` that torch's Adam does not take.
FUSED_ADAM_ONLY = ("bias_correction", "set_grad_none")
# A schedule that sets the rate -> its parameter that holds the highest rate, or that a range test begins with.
# Source: deepspeed 0.19.8 runtime/lr_schedules.py; OneCycleLR and CyclicLR in torch.optim.lr_scheduler.
PEAKS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "OneCycleLR": "max_lr",
    "CyclicLR": "max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
}
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


def overwrites(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> list[Change]:
    """What ``overwrite_deepspeed_args``, leaf by leaf, and the shorthands change in a DeepSpeed JSON.

    Source: ``overwrite_deepspeed_config`` in determined 0.38.1's ``pytorch/deepspeed``.
    """
    over = hp.overwrite_deepspeed_args
    stated: list[tuple[KeyPath, Any, KeyPath]] = [
        (path, get_path(over, path), (OVERWRITES, *path)) for path in leaf_paths(over)
    ]
    stated += [(SHORTHANDS[key], value, (key,)) for key, value in hp.shorthands.items()]
    changes: list[Change] = []
    for path, value, place in stated:
        origin = hyperparameters.origin(place)
        if not origin.startswith("--"):
            origin = origin.reworded(f"{place[0]}, {origin}")
        if value is not None or path not in REMOVABLE:
            changes.append((path, value, origin))
        elif ds.get(path) is not None:
            changes.append((path, NOT_GIVEN, origin))
    return changes


# ------------------------------------------------------------------------------------------- stated twice


class StatedRate(NamedTuple):
    """A rate that a DeepSpeed JSON states: where, and its value; of a schedule also a list, one a parameter group."""

    path: KeyPath
    value: Any


def stated_rate(ds: Document) -> StatedRate | None:
    """The rate that a DeepSpeed JSON states and that is trained with; None where it leaves the rate open."""
    for path in _places_of_rate(ds):
        value = ds.get(path)
        if _is_number(value) or isinstance(value, list):
            return StatedRate(path, value)
    return None


def _places_of_rate(ds: Document) -> list[KeyPath]:
    """Where a rate may be stated: of a schedule that sets it, and of the optimizer."""
    peak = PEAKS.get(str(ds.get(("scheduler", "type"))))
    return [("scheduler", "params", peak), LR] if peak else [LR]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def disagreements(ds: Document, hyperparameters: Document) -> list[Problem]:
    """A warning for each value that is not used: of the optimizer's rate where the schedule states another, and of
    hyperparameters that would fill a value which the DeepSpeed JSON states, and differently.
    """
    problems = []
    for path in ds.once("stated values", lambda: _stated_values(ds)):
        value, (name, own) = ds.get(path), _hyperparameter(path[-1], hyperparameters)
        if own not in (None, value):
            message = f"is not used: the DeepSpeed JSON states {ds.key(path)} = {value} ({ds.origin(path)})"
            fix = f'write "auto" there to use the hyperparameter, or remove {name}'
            problems.append(hyperparameters.problem((name,), message, fix, "stated-twice"))
    rate, own = stated_rate(ds), ds.get(LR)
    used = rate.value if rate and isinstance(rate.value, list) else [rate and rate.value]
    if rate and rate.path != LR and _is_number(own) and own not in used:
        by = f"{ds.key(rate.path)} = {rate.value} ({ds.origin(rate.path)})"
        message = f"is not used: {ds.get(('scheduler', 'type'))} sets the rate, by {by}"
        fix = f'write "auto" for {ds.key(rate.path)} to use it, or "auto" here'
        problems.append(ds.problem(LR, message, fix, "stated-twice"))
    return problems


def _stated_values(ds: Document) -> list[KeyPath]:
    """Where a DeepSpeed JSON states what a hyperparameter would fill: the rate that is trained with, and the rest."""
    rate, places = stated_rate(ds), _places_of_rate(ds)
    paths: list[KeyPath] = [(section, "params", leaf) for section in IF_ABSENT for leaf in IF_ABSENT[section]]
    paths = [*([rate.path] if rate else []), *(path for path in (*paths, CLIPPING) if path not in places)]
    return [path for path in paths if ds.get(path) not in (None, AUTO)]


# ------------------------------------------------------------------------------------------- "auto"


def fills(
    ds: Document, hyperparameters: Document, fit: FitOptions, topology: Topology, accelerator: Accelerator
) -> tuple[list[Change], list[Problem]]:
    """What stands for every "auto" of a DeepSpeed JSON, and for what is absent and needs a value; the batch apart.

    Returns:
        The changes, and a problem for each "auto" that nothing determines and that DeepSpeed has no default for;
        that one is left out of the JSON.
    """
    changes: dict[KeyPath, tuple[Any, str]] = {}
    problems: list[Problem] = []
    for path, value, by in (
        *_precision(ds, topology, accelerator),
        *tensor_parallel_values(ds, topology.model_parallel_size),
        *_shared(ds, hyperparameters, topology.sequence_parallel_size),
    ):
        changes[path] = value, by

    def now(*path: str) -> Any:
        value = changes.get(path, (ds.get(path),))[0]
        return None if value is NOT_GIVEN else value

    of_accelerator = Origin(f"the accelerator: {accelerator.name}")
    rate, places, length = stated_rate(ds), _places_of_rate(ds), fit.max_length
    for path in ds.once("open places", lambda: _open_places(ds)):
        if path in changes or (*path, "enabled") in changes:
            continue
        leaf, is_auto, in_list = path[-1], ds.get(path) == AUTO, int in map(type, path)
        name, value = _hyperparameter(leaf, hyperparameters)
        if leaf == "total_num_steps" and length and length.unit == "batches":
            name, value = "fit.max_length", length.value
        elif leaf == "betas" and value is None:
            pair = [hyperparameters.get((each,)) for each in ("adam_beta1", "adam_beta2")]
            name, value = ("adam_beta1", pair) if None not in pair else (name, None)
        origin = Origin()
        if rate and path in places and _is_number(rate.value):  # stated in the other place
            place = ds.origin(rate.path)
            value, origin = rate.value, place.reworded(f"{ds.key(rate.path)}, {place}")
        elif leaf == "pin_memory":
            value, origin = accelerator.name == "cuda", of_accelerator
        elif value is not None:
            place = hyperparameters.origin(tuple(name.split(".")))
            origin = place.reworded(f"{name}, {place}")
        elif path in DEFAULTS and (is_auto or path == CLIPPING):
            value, origin = DEFAULTS[path]
        elif leaf == "warmup_min_lr":
            # From 0, the first steps would train nothing: WarmupLR in deepspeed 0.19.8's runtime/lr_schedules.py
            # takes two steps at warmup_min_lr.
            peak, count = (now("scheduler", "params", each) for each in ("warmup_max_lr", "warmup_num_steps"))
            value, origin = 0.0, Origin("a warm-up from 0")
            if _is_number(peak) and _is_number(count) and count >= 1:
                value, origin = peak / count, Origin("warmup_max_lr / warmup_num_steps")
        if value is not None and not in_list:
            changes[path] = value, origin
            continue
        # Without its highest rate, WarmupDecayLR would go up to 0.001, whatever rate the trial's own optimizer has.
        is_decay = leaf == "warmup_max_lr" and now("scheduler", "type") == "WarmupDecayLR"
        if in_list or is_decay or leaf == "total_num_steps" or (is_auto and leaf in NEEDED):
            fix = f"add the hyperparameter {name}, or write a number"
            if in_list:
                fix = '"auto" stands for a whole value: write the list, or "auto" in its place'
            elif leaf == "total_num_steps":
                fix = "state fit.max_length in batches, or write the number of steps"
            message = f"{'' if is_auto else 'missing, and '}nothing says what it should be"
            problems.append(ds.problem(path, message, fix, "auto-undetermined"))
        if is_auto and not in_list:
            changes[path] = NOT_GIVEN, ""

    changes |= dict.fromkeys(_torch_adam(now, on_gpu=accelerator.name != "cpu"), (True, of_accelerator))
    if accelerator.name != "cpu" and not now("steps_per_print") and now("timers", "throughput") is None:
        # The timer waits for the device twice a micro-batch; steps_per_print prints what it measures.
        # Source: ThroughputTimer in deepspeed 0.19.8's utils/timer.py, which is on by default.
        changes["timers", "throughput", "enabled"] = False, of_accelerator
    return [(path, *change) for path, change in changes.items()], problems


def _open_places(ds: Document) -> list[KeyPath]:
    """Where "auto" stands, and where a parameter is absent that a hyperparameter may state."""

    def autos(data: dict[str, Any] | list[Any], path: KeyPath) -> Iterator[KeyPath]:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            if isinstance(value, (dict, list)):
                yield from autos(value, (*path, key))
            elif value == AUTO:
                yield (*path, key)

    absent: list[KeyPath] = [CLIPPING]
    for section, leaves in IF_ABSENT.items():
        kind = ds.get((section, "type"))
        takes = params_of(section, kind)
        if takes is None:  # torch's own
            takes = ["lr"] if section == "optimizer" and isinstance(kind, str) else []
        absent += [(section, "params", leaf) for leaf in leaves if leaf in takes]
    places = [path for path in autos(ds.data, ()) if path[0] not in BATCH_KEYS]
    places += [path for path in absent if ds.get(path) is None]
    return sorted(places, key=lambda path: path[-1] == "warmup_min_lr")  # which depends on the rest


def _hyperparameter(leaf: str | int, hyperparameters: Document) -> tuple[str, Any]:
    """Name and value of the hyperparameter that fills a leaf; the value is None where there is none."""
    names = HYPERPARAMETER_NAMES.get(str(leaf), (str(leaf),))
    for name in names:
        value = hyperparameters.data.get(name)
        if value is not None and value != AUTO:
            return name, value
    return names[0], None


def _precision(ds: Document, topology: Topology, accelerator: Accelerator) -> Iterator[Change]:
    """bf16 "auto" is on where the accelerator is made for it; else fp16 "auto" where that is all it has."""
    sections = [ds.get(("bf16",)), ds.get(("fp16",))]
    asked = [each.get("enabled") if isinstance(each, dict) else each for each in sections]
    bf16, fp16 = asked
    if bf16 == AUTO:
        bf16 = accelerator.bf16 and fp16 is not True
    if fp16 == AUTO:
        fp16 = accelerator.name == "cuda" and not bf16
    for section, stated, on in zip(("bf16", "fp16"), asked, (bf16, fp16), strict=True):
        if stated == AUTO:
            yield (section, "enabled"), on, f"the accelerator: {accelerator.name}"
    dtype: KeyPath = ("data_types", "grad_accum_dtype")
    # Without ZeRO, DeepSpeed accumulates in what the model computes in, and refuses anything else.
    in_pipeline = topology.pipe_parallel_size > 1 and bf16 is True and ds.get((ZERO, "stage"))
    if in_pipeline and ds.get(dtype) in (None, AUTO):
        yield dtype, "fp32", "bf16 pipelines accumulate in fp32"


def tensor_parallel_values(ds: Document, size: int, *, everywhere: bool = False) -> list[Change]:
    """What the section ``tensor_parallel`` leaves open; with ``everywhere``, also where there is no such section.

    ``vocab_parallel_lm_head`` is off unless it is stated: DeepSpeed would turn it on where the output layer is tied to
    the embedding, and the model would then return each rank its own part of the logits. Source: deepspeed 0.19.8
    ``DeepSpeedEngine._apply_autotp_partitioning`` in ``runtime/engine.py``.
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


def _shared(ds: Document, hyperparameters: Document, sequences: int) -> Iterator[Change]:
    """Ranks that share a sequence, by which replicas are counted, or experts: without a size, an "auto" is off."""
    key = "sequence_parallel_size"
    if sequences > 1 and ds.get((key,)) in (None, AUTO):
        place = hyperparameters.origin((key,))
        yield (key,), sequences, place.reworded(f"hyperparameters.{key}, {place}")
    size = hyperparameters.get(("expert_parallel_size",))
    is_set = type(size) is int and size >= 1
    for key, value in (("enabled", is_set), ("autoep_size", size if is_set else 1)):
        if ds.get(("expert_parallel", key)) in ((None, AUTO) if is_set else (AUTO,)):
            yield ("expert_parallel", key), value, "expert_parallel_size"


def _torch_adam(now: Callable[..., Any], *, on_gpu: bool) -> Iterator[KeyPath]:
    """Torch's own Adam, so that nothing has to be compiled before the first step; on GPUs the fused one.

    DeepSpeed's ``FusedAdam`` is built by nvcc at its first use, and few machines with GPUs have that compiler. What is
    stated stays, and so does what only DeepSpeed's takes: an offloaded state, and parameters that torch's has not.

    Source: ``get_optimizer_configuration`` in deepspeed 0.19.8's ``runtime/engine.py``; ``Adam.__init__`` in torch's
    ``optim/adam.py`` for what ``fused`` excludes.
    """
    stated, kind = partial(now, *PARAMS), str(now("optimizer", "type") or "").lower()
    if kind not in ("adam", "adamw", "muon") or stated("torch_adam") is not None:
        return
    is_offloaded = now(ZERO, "offload_optimizer", "device") in ("cpu", "nvme")
    if on_gpu and (is_offloaded or any(stated(name) is not None for name in FUSED_ADAM_ONLY)):
        return
    yield (*PARAMS, "torch_adam")
    excluded = stated("foreach") or stated("differentiable") or stated("fused") is not None
    if on_gpu and kind != "muon" and not excluded:
        yield (*PARAMS, "fused")


def batch_sizes(ds: Document, batch: Batch, own: int | None, place: Origin) -> Iterator[Change]:
    """The batch sizes that a DeepSpeed JSON leaves open; ``own`` is the stated ``global_batch_size``, of that place."""
    for key, name in BATCH_KEYS.items():
        if ds.get((key,)) not in (None, AUTO):
            continue
        said = {BATCH_KEYS[each]: each for each in BATCH_KEYS if each not in (key, "train_batch_size")}
        said["replicas"] = REPLICAS
        factors = " x ".join(f"{word} {getattr(batch, each)}" for each, word in said.items())
        derived = f"derived: {TOTAL} {batch.global_batch_size} / ({factors})"
        if name == TOTAL:
            derived = f"{TOTAL}, {place}" if own is not None else f"derived: {factors}"
        yield (key,), getattr(batch, name), place.reworded(derived)
