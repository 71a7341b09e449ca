"""From a DeepSpeed JSON as it is written to the one that DeepSpeed is given: what is overwritten, and what is filled.

``"auto"`` stands for what the accelerator, the topology or a hyperparameter says, or for DeepSpeed's own default. The
same fills what is absent of the optimizer's and the schedule's parameters. A value that nothing determines is left out,
so that DeepSpeed's default holds; where DeepSpeed has none worth having (the learning rate, the length of a schedule)
it is a problem.

Some schedules never read the optimizer's learning rate: they set it, from parameters of their own. A rate that is
stated in one of the two places fills the other, so that the stated one is trained with; where both state one, the
schedule's is used, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from determined_ds.config.ds_schema import ZERO, params_of
from determined_ds.config.layout import BATCH_KEYS, REPLICAS, Batch
from determined_ds.config.params import AUTO, OVERWRITES, SHORTHANDS, TOTAL, Hyperparameters
from determined_ds.documents.document import Change, Document, KeyPath, leaves
from determined_ds.errors import NOT_GIVEN, Origin, Problem

if TYPE_CHECKING:
    from determined_ds.config.resolve import ResolvedConfig

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
PARAMS: KeyPath = ("optimizer", "params")
LR: KeyPath = (*PARAMS, "lr")
START: KeyPath = ("scheduler", "params", "warmup_min_lr")
CLIPPING: KeyPath = ("gradient_clipping",)
# Parameters that are filled where they are absent, if the optimizer or the schedule takes them.
IF_ABSENT: list[KeyPath] = [
    *((*PARAMS, leaf) for leaf in ("lr", "betas", "eps", "weight_decay")),
    *(
        ("scheduler", "params", leaf)
        for leaf in ("warmup_max_lr", "lr_range_test_min_lr", "warmup_num_steps")
    ),
    ("scheduler", "params", "total_num_steps"),
]
# DeepSpeed clips by default, which is written out, so that it is seen (GRADIENT_CLIPPING_DEFAULT in deepspeed 0.19.8's
# runtime/constants.py). Its optimizers and torch's disagree about the weight decay (0.01 or 0), and a hyperparameter of
# 0 is lost where the web UI turns an experiment into a search; only "auto" is filled so.
DEFAULTS: dict[KeyPath, tuple[float, Origin]] = {
    CLIPPING: (1.0, Origin("DeepSpeed's default")),
    (*PARAMS, "weight_decay"): (0.0, Origin("no weight decay is stated")),
}
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


# ------------------------------------------------------------------------------------------- what is stated


def overwrites(ds: Document, hyperparameters: Document, hp: Hyperparameters) -> list[Change]:
    """What ``overwrite_deepspeed_args``, leaf by leaf, and the shorthands change in a DeepSpeed JSON.

    Source: ``overwrite_deepspeed_config`` in determined 0.38.1's ``pytorch/deepspeed``.
    """
    changes: list[Change] = []
    over = hp.overwrite_deepspeed_args
    stated: dict[KeyPath, KeyPath] = {(OVERWRITES, *path): path for path, _ in leaves(over)}
    stated |= {(name,): SHORTHANDS[name] for name in hp.shorthands}
    for place, path in stated.items():
        value, origin = hyperparameters.get(place), hyperparameters.origin(place)
        if not origin.startswith("--"):
            origin = origin.reworded(f"{place[0]}, {origin}")
        if value is not None or path not in REMOVABLE:
            changes.append((path, value, origin))
        elif ds.get(path) is not None:
            changes.append((path, NOT_GIVEN, origin))
    return changes


def place_of_rate(ds: Document) -> KeyPath | None:
    """Where a DeepSpeed JSON states the rate that is trained with; None where it leaves the rate open.

    There is a number; of a schedule also a list, one a parameter group.
    """
    values = ((path, ds.get(path)) for path in _places_of_rate(ds))
    return next((path for path, value in values if _is_number(value) or isinstance(value, list)), None)


def _places_of_rate(ds: Document) -> list[KeyPath]:
    """Where a rate may be stated: of a schedule that sets it, and of the optimizer."""
    peak = PEAKS.get(str(ds.get(("scheduler", "type"))))
    return [("scheduler", "params", peak), LR] if peak else [LR]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _hyperparameter(leaf: str | int, hyperparameters: Document) -> tuple[str, Any]:
    """Name and value of the hyperparameter that fills a leaf; the value is None where there is none."""
    names = HYPERPARAMETER_NAMES.get(str(leaf), (str(leaf),))
    for name in names:
        value = hyperparameters.data.get(name)
        if value is not None and value != AUTO:
            return name, value
    return names[0], None


def disagreements(ds: Document, hyperparameters: Document) -> list[Problem]:
    """A warning for each value that is not used: of the optimizer's rate where the schedule states another, and of
    hyperparameters that would fill a value which the DeepSpeed JSON states, and differently.
    """
    problems, rate, places = [], place_of_rate(ds), _places_of_rate(ds)
    for path in (rate, *(path for path in (*IF_ABSENT, CLIPPING) if path not in places)):
        value = path and ds.get(path)
        if not path or value in (None, AUTO):
            continue
        name, own = _hyperparameter(path[-1], hyperparameters)
        if own not in (None, value):
            message = f"is not used: the DeepSpeed JSON states {ds.key(path)} = {value} ({ds.origin(path)})"
            fix = f'write "auto" there to use the hyperparameter, or remove {name}'
            problems.append(hyperparameters.problem((name,), message, fix, "stated-twice"))
    if rate not in (None, LR) and _is_number(own := ds.get(LR)):
        used, key = ds.get(rate), ds.key(rate)
        if own not in (used if isinstance(used, list) else [used]):
            message = f"is not used: {ds.get(('scheduler', 'type'))} sets the rate, by {key} = {used}"
            message += f" ({ds.origin(rate)})"
            fix = f'write "auto" for {key} to use it, or "auto" here'
            problems.append(ds.problem(LR, message, fix, "stated-twice"))
    return problems


# ------------------------------------------------------------------------------------------- what is left open


def fills(c: ResolvedConfig) -> tuple[list[Change], list[Problem]]:
    """What stands for every "auto" of a DeepSpeed JSON, and for what is absent and needs a value; the batch apart.

    An "auto" that nothing determines is left out; it is a problem where DeepSpeed has no default worth having.
    """
    ds, topology, accelerator = c.ds, c.topology, c.accelerator.name
    on_gpu, by_accelerator = accelerator != "cpu", Origin(f"the accelerator: {accelerator}")
    changes: dict[KeyPath, tuple[Any, str]] = {}

    def now(*path: str | int) -> Any:
        value = changes[path][0] if path in changes else ds.get(path)
        return None if value == AUTO else value

    def fill(path: KeyPath, value: Any, origin: str) -> None:
        if now(*path) is None:
            changes[path] = value, origin

    # bf16 "auto" is on where the accelerator is made for it; else fp16 "auto" where that is all it has.
    if ds.get(("bf16", "enabled")) == AUTO:
        fill(("bf16", "enabled"), c.accelerator.bf16 and now("fp16", "enabled") is not True, by_accelerator)
    if ds.get(("fp16", "enabled")) == AUTO:
        fill(("fp16", "enabled"), accelerator == "cuda" and not now("bf16", "enabled"), by_accelerator)
    if topology.pipe_parallel_size > 1 and now("bf16", "enabled") is True and now(ZERO, "stage"):
        # Without ZeRO, DeepSpeed accumulates in what the model computes in, and refuses anything else.
        fill(("data_types", "grad_accum_dtype"), "fp32", "bf16 pipelines accumulate in fp32")

    # Ranks that share a layer, a sequence, by which replicas are counted, or experts.
    for path, value, origin in tensor_parallel_values(ds, topology.model_parallel_size):
        fill(path, value, origin)
    if topology.sequence_parallel_size > 1:
        key: KeyPath = ("sequence_parallel_size",)
        place = c.hyperparameters.origin(key)
        fill(key, topology.sequence_parallel_size, place.reworded(f"hyperparameters.{key[0]}, {place}"))
    experts = c.hyperparameters.get(("expert_parallel_size",))
    is_set = type(experts) is int and experts >= 1
    for name, value in (("enabled", is_set), ("autoep_size", experts if is_set else 1)):
        if is_set or ds.get(("expert_parallel", name)) == AUTO:
            fill(("expert_parallel", name), value, "expert_parallel_size")

    # All else that is open, by whoever states it.
    places = _open_places(ds)
    rate, rates = place_of_rate(ds), _places_of_rate(ds)
    for path in places:
        if path[-1] == "pin_memory":
            fill(path, accelerator == "cuda", by_accelerator)
        elif rate and path in rates and _is_number(ds.get(rate)):
            fill(path, ds.get(rate), ds.origin(rate).reworded(f"{ds.key(rate)}, {ds.origin(rate)}"))
        elif said := _said_by_hyperparameters(c, path[-1]):
            fill(path, *said)
        elif path in DEFAULTS and (path == CLIPPING or ds.get(path) == AUTO):
            fill(path, *DEFAULTS[path])
    if ds.get(START) == AUTO:
        # From 0, the first steps would train nothing: WarmupLR in deepspeed 0.19.8's runtime/lr_schedules.py takes two
        # steps at warmup_min_lr.
        peak, count = (now("scheduler", "params", leaf) for leaf in ("warmup_max_lr", "warmup_num_steps"))
        if _is_number(peak) and _is_number(count) and count >= 1:
            fill(START, peak / count, Origin("warmup_max_lr / warmup_num_steps"))
        fill(START, 0.0, Origin("a warm-up from 0"))

    # Torch's own Adam, so that nothing has to be compiled before the first step; on GPUs the fused one. DeepSpeed's
    # FusedAdam is built by nvcc at its first use, and few machines with GPUs have that compiler. What is stated stays,
    # and so does what only DeepSpeed's takes: an offloaded state, and parameters that torch's has not.
    # Source: get_optimizer_configuration in deepspeed 0.19.8's runtime/engine.py; Adam.__init__ in torch's
    # optim/adam.py for what "fused" excludes.
    kind, param = str(now("optimizer", "type")).lower(), partial(now, *PARAMS)
    only_deepspeed = now(ZERO, "offload_optimizer", "device") in ("cpu", "nvme")
    only_deepspeed |= param("bias_correction") is not None or param("set_grad_none") is not None
    is_open = kind in ("adam", "adamw", "muon") and param("torch_adam") is None
    if is_open and not (on_gpu and only_deepspeed):
        fill((*PARAMS, "torch_adam"), True, by_accelerator)
        if on_gpu and kind != "muon" and not (param("foreach") or param("differentiable")):
            fill((*PARAMS, "fused"), True, by_accelerator)
    if on_gpu and not now("steps_per_print") and now("timers", "throughput") is None:
        # The timer waits for the device twice a micro-batch; steps_per_print prints what it measures.
        # Source: ThroughputTimer in deepspeed 0.19.8's utils/timer.py, which is on by default.
        fill(("timers", "throughput", "enabled"), False, by_accelerator)

    problems = [*_undetermined(c, places, now)]
    changes |= {path: (NOT_GIVEN, "") for path in places if ds.get(path) == AUTO and now(*path) is None}
    return [(path, *change) for path, change in changes.items()], problems


def _undetermined(c: ResolvedConfig, places: list[KeyPath], now: Callable[..., Any]) -> Iterator[Problem]:
    """A problem for each place that is open still, ``now`` saying what it holds, and has no default worth having."""
    for path in places:
        leaf, is_auto = path[-1], c.ds.get(path) == AUTO
        message = f"{'' if is_auto else 'missing, and '}nothing says what it should be"
        fix = f"add the hyperparameter {_hyperparameter(leaf, c.hyperparameters)[0]}, or write a number"
        if isinstance(c.ds.get(path), list):
            message, fix = 'has an "auto" in it', 'write the whole list, or "auto" in its place'
        elif now(*path) is not None:
            continue
        elif leaf == "total_num_steps":
            fix = "state fit.max_length in batches, or write the number of steps"
        elif leaf == "warmup_max_lr" and now("scheduler", "type") == "WarmupDecayLR":
            pass  # without its highest rate it would go up to 0.001, whatever rate the trial's own optimizer has
        elif not is_auto or leaf not in NEEDED:
            continue
        yield c.ds.problem(path, message, fix, "auto-undetermined")


def _open_places(ds: Document) -> list[KeyPath]:
    """Where "auto" stands, alone or in a list, and where a parameter is absent that a hyperparameter may state."""

    def is_taken(section: str | int, leaf: str | int) -> bool:
        kind = ds.get((section, "type"))
        known = params_of(str(section), kind)
        return leaf == "lr" and isinstance(kind, str) if known is None else leaf in known  # None: torch's own

    stated = ((path, value) for path, value in leaves(ds.data) if path[0] not in BATCH_KEYS)
    autos = [path for path, value in stated if value == AUTO or (isinstance(value, list) and AUTO in value)]
    absent = [CLIPPING, *(path for path in IF_ABSENT if is_taken(path[0], path[-1]))]
    return [*autos, *(path for path in absent if ds.get(path) is None)]


def _said_by_hyperparameters(c: ResolvedConfig, leaf: str | int) -> tuple[Any, str] | None:
    """What hyperparameters have for an open leaf of the JSON, and which of them; None where they have nothing."""
    name, value = _hyperparameter(leaf, c.hyperparameters)
    length = c.fit.max_length
    if leaf == "total_num_steps" and length and length.unit == "batches":
        name, value = "fit.max_length", length.value
    elif leaf == "betas" and value is None:
        pair = [c.hyperparameters.get((each,)) for each in ("adam_beta1", "adam_beta2")]
        name, value = "adam_beta1", None if None in pair else pair
    if value is None:
        return None
    place = c.hyperparameters.origin(tuple(name.split(".")))
    return value, place.reworded(f"{name}, {place}")


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


def batch_sizes(ds: Document, batch: Batch, place: Origin, *, is_stated: bool) -> Iterator[Change]:
    """The batch sizes that a JSON leaves open; ``place`` is that of ``global_batch_size`` where it is stated."""
    total, micro, steps = BATCH_KEYS
    of_micro, of_steps = f"{micro} {batch.micro_batch_size}", f"{steps} {batch.accumulation}"
    whole, replicas = f"{TOTAL} {batch.global_batch_size}", f"{REPLICAS} {batch.replicas}"
    by = {
        total: f"{TOTAL}, {place}" if is_stated else f"derived: {of_micro} x {of_steps} x {replicas}",
        micro: f"derived: {whole} / ({of_steps} x {replicas})",
        steps: f"derived: {whole} / ({of_micro} x {replicas})",
    }
    for key, name in BATCH_KEYS.items():
        if ds.get((key,)) in (None, AUTO):
            yield (key,), getattr(batch, name), place.reworded(by[key])
