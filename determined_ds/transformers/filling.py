"""Arguments of transformers and hyperparameters -> one configuration, which both are then filled from.

transformers fills the ``"auto"`` of a DeepSpeed JSON from its arguments, and this library from the hyperparameters.
Here the hyperparameters are completed by the arguments, reconciled once, and the arguments are set from the outcome:
what transformers fills or compares afterwards is equal by construction. A value that is stated in both places, and
differently, is an error.

Source: ``HfTrainerDeepSpeedConfig`` in transformers 5.23's ``integrations/deepspeed.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.config.fill import HYPERPARAMETER_NAMES, LR, stated_rate
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import (
    AUTO,
    LARGEST,
    OVERWRITES,
    PARALLEL_SIZES,
    parse_hyperparameters,
    stated_at,
)
from determined_ds.config.resolve import ResolvedConfig, reconcile
from determined_ds.documents.document import Document, KeyPath, dotted, get_path
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.transformers.lengths import fields_of_fit, length_of_fields, length_problems

ARGUMENTS = "TrainingArguments"
STATED_TWICE = "stated-twice"
MICRO, ACCUMULATION = ("train_micro_batch_size_per_gpu",), ("gradient_accumulation_steps",)
BATCH: dict[str, KeyPath] = {
    "per_device_train_batch_size": MICRO,
    "gradient_accumulation_steps": ACCUMULATION,
}
SCHEDULE: KeyPath = ("scheduler", "params")
WARMUP: KeyPath = (*SCHEDULE, "warmup_num_steps")
PEAK: KeyPath = (*SCHEDULE, "warmup_max_lr")
FIRST: KeyPath = (*SCHEDULE, "warmup_min_lr")
TOTAL: KeyPath = (*SCHEDULE, "total_num_steps")
# Argument -> the leaf of the JSON that it fills; a hyperparameter fills it by the names of that leaf.
LEAVES: dict[str, KeyPath] = {
    "learning_rate": LR,
    "adam_epsilon": ("optimizer", "params", "eps"),
    "weight_decay": ("optimizer", "params", "weight_decay"),
    "max_grad_norm": ("gradient_clipping",),
    "warmup_steps": WARMUP,
}
BETAS: KeyPath = ("optimizer", "params", "betas")
BETA_FIELDS = ("adam_beta1", "adam_beta2")
PRECISIONS = ("bf16", "fp16")
# Filled by transformers from the model's hidden size, once there is a model; the last two under ZeRO 3 only.
BUCKETS: tuple[KeyPath, ...] = tuple(
    ("zero_optimization", key)
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
# Schedules of a JSON, and those of transformers that mean the same; others that are stated would be ignored.
SCHEDULES = {
    "WarmupDecayLR": ("linear",),
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupCosineLR": ("cosine",),
}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the arguments state.

    Args:
        values: Argument -> value, defaults included.
        stated: Argument -> where it is stated; those at their default are not in it.
    """

    values: Mapping[str, Any]
    stated: Mapping[str, str]

    def origin(self, field: str) -> str:
        return self.stated.get(field, f"{ARGUMENTS}.{field}, by default")


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What both sides train with.

    Args:
        resolved: The configuration. A value that only transformers can fill has a stand-in there.
        ds_config: What transformers is given: the same, with "auto" where it fills a value from the model or the data.
        fields: Argument -> its value.
    """

    resolved: ResolvedConfig
    ds_config: dict[str, Any]
    fields: dict[str, Any]


def fill(
    given: Given,
    hyperparameters: Document,
    ds: Document,
    *,
    slots: int,
    accelerator: Accelerator,
    machines: int = 1,
) -> Filled:
    """Reconcile the arguments of transformers with the hyperparameters.

    Args:
        given: The arguments.
        hyperparameters: The trial's.
        ds: The DeepSpeed JSON as written.
        slots: Ranks in all.
        accelerator: What they compute on.
        machines: Machines that the slots are spread over.

    Raises:
        ConfigError: every reason why it cannot run, and every value that is stated twice, with both places.
    """
    own = parse_hyperparameters(hyperparameters)
    problems = [*length_problems(hyperparameters, own.fit), *_not_here(hyperparameters)]
    hyperparameters = _with_length(hyperparameters, given)
    completed = _Completion(hyperparameters, ds, given)
    try:
        resolved = reconcile(
            completed.hyperparameters, completed.ds, slots=slots, accelerator=accelerator, machines=machines
        )
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems], error.warnings) from None
    fit = completed.hyperparameters.get(("fit",)) or {}
    fields = fields_of_fit(resolved.fit, fit) | _fields_of(resolved, completed.hyperparameters)
    for name in completed.deferred_fields:
        fields[name] = given.values[name]
    problems += [
        *_contradictions(given, fields, resolved),
        *_two_rates(resolved),
        *_other_total(resolved, completed.deferred),
        *_not_used(given, resolved),
    ]
    if problems:
        raise ConfigError(problems, resolved.warnings)
    return Filled(resolved=resolved, ds_config=completed.handed_on(resolved), fields=fields)


class _Completion:
    """Hyperparameters and a DeepSpeed JSON, completed by arguments where neither states a value."""

    def __init__(self, hyperparameters: Document, ds: Document, given: Given) -> None:
        self.hyperparameters, self.ds, self._given = hyperparameters, ds, given
        self.deferred: list[KeyPath] = []
        self.deferred_fields: list[str] = []
        self._take_sizes()
        self._take_precision()
        self._take_values()
        self._defer_total()

    def _in_json(self, path: KeyPath) -> Any:
        """A value of the JSON as it is overwritten; None where it leaves it open."""
        over = stated_at(self.hyperparameters, (OVERWRITES, *path))
        value = self.ds.get(path) if over is None else over
        return None if value == AUTO else value

    def _is_auto(self, path: KeyPath) -> bool:
        over = get_path(self.hyperparameters.get((OVERWRITES,)) or {}, path)
        return (self.ds.get(path) if over is None else over) == AUTO

    def _hyperparameter(self, *names: str) -> Any:
        values = (self.hyperparameters.get((name,)) for name in names)
        return next((value for value in values if value not in (None, AUTO)), None)

    def _set(self, path: KeyPath, value: Any, field: str) -> None:
        self.ds = self.ds.overwritten(path, value, self._given.origin(field))

    def _add(self, name: str, value: Any, field: str) -> None:
        origin = self._given.origin(field)
        self.hyperparameters = self.hyperparameters.overwritten((name,), value, origin)

    def _take_sizes(self) -> None:
        total = self._hyperparameter("global_batch_size") or self._in_json(("train_batch_size",))
        for field, path in BATCH.items():
            is_stated = field in self._given.stated
            needed = field == "per_device_train_batch_size" and total is None
            by_name = self._hyperparameter("micro_batch_size", field) if path == MICRO else None
            if (is_stated or needed) and by_name is None and self._in_json(path) is None:
                self._set(path, self._given.values[field], field)

    def _take_precision(self) -> None:
        for name, other in (PRECISIONS, PRECISIONS[::-1]):
            value = self._given.values.get(name)
            if name not in self._given.stated or self._in_json((name, "enabled")) is not None:
                continue
            if value or self.ds.get((name,)) is not None:
                self._set((name, "enabled"), bool(value), name)
            if value and self._is_auto((other, "enabled")):
                self._set((other, "enabled"), False, name)

    def _take_values(self) -> None:
        rate = stated_rate(self.ds) or self._in_json(LR) or self._in_json(PEAK)
        for field, path in LEAVES.items():
            names = HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),))
            in_json = rate if path == LR else self._in_json(path)
            if in_json is not None or self._hyperparameter(*names) is not None:
                continue
            value = self._given.values[field]
            if path == WARMUP:
                value = self._warmup(value)
            if value is not None:
                self._add(names[0], value, field)
        if self._hyperparameter("betas") is None and self._in_json(BETAS) is None:
            pair = [self._hyperparameter(name) for name in BETA_FIELDS]
            if None in pair:
                own = [self._given.values[name] for name in BETA_FIELDS]
                self._add(
                    "betas",
                    [a if a is not None else b for a, b in zip(pair, own, strict=True)],
                    BETA_FIELDS[0],
                )

    def _warmup(self, steps: float) -> int | None:
        """The steps of a warm-up, which the arguments may state as a share of all steps."""
        if steps >= 1 or not steps:
            return max(1, int(steps))
        length = self.hyperparameters.get(("fit", "max_length")) or {}
        if isinstance(length.get("batches"), int):
            return max(1, math.ceil(length["batches"] * steps))
        if self.ds.get(("scheduler",)) is None:
            return None
        self.deferred.append(WARMUP)
        self.deferred_fields.append("warmup_steps")
        if self._is_auto(FIRST):
            self.deferred.append(FIRST)
        return 1

    def _defer_total(self) -> None:
        """The length of a schedule, where it is known only with the length of the data."""
        kind = self._in_json(("scheduler", "type"))
        length = self.hyperparameters.get(("fit", "max_length")) or {}
        if kind not in ("WarmupDecayLR", "WarmupCosineLR") or isinstance(length.get("batches"), int):
            return
        if self._in_json(TOTAL) is None and self._hyperparameter("total_num_steps") is None:
            self.deferred.append(TOTAL)
            self.ds = self.ds.overwritten(TOTAL, LARGEST, "the length of the data")

    def handed_on(self, resolved: ResolvedConfig) -> dict[str, Any]:
        """The configuration with "auto" where transformers fills it."""
        open_buckets = [path for path in BUCKETS if self._is_auto(path)]
        if resolved.zero_stage != 3:
            open_buckets = [path for path in open_buckets if path == BUCKETS[0]]
        changes = ((path, AUTO, "transformers") for path in [*self.deferred, *open_buckets])
        return with_zero(resolved.ds.overwritten_all(changes).data)


def with_zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration with a section of ZeRO, which accelerate requires; absent means stage 0."""
    return {"zero_optimization": {"stage": 0}, **config}


def _with_length(hyperparameters: Document, given: Given) -> Document:
    """With ``fit.max_length`` from the arguments, where it is not stated."""
    if hyperparameters.get(("fit", "max_length")) is not None:
        return hyperparameters
    length = length_of_fields(given.values)
    if length is None:
        return hyperparameters
    field = "max_steps" if "batches" in length else "num_train_epochs"
    return hyperparameters.overwritten(("fit", "max_length"), length, given.origin(field))


def _not_here(hyperparameters: Document) -> Iterator[Problem]:
    """Hyperparameters of this library that transformers cannot carry out."""
    for name in PARALLEL_SIZES:
        if hyperparameters.get((name,)) not in (None, AUTO, 1):
            message, fix = "transformers' Trainer trains replicas only", f"remove {name}, or write 1"
            yield hyperparameters.problem((name,), message, fix, "hf-replicas")
    if hyperparameters.get(("sdpa_kernel",)) not in (None, AUTO):
        fix = "remove it, and give attn_implementation to from_pretrained or from_config"
        yield hyperparameters.problem(("sdpa_kernel",), "is not read by transformers", fix, "hf-kernel")


def _fields_of(resolved: ResolvedConfig, hyperparameters: Document) -> dict[str, Any]:
    """The arguments that a configuration determines."""
    config, batch = resolved.ds.data, resolved.batch
    fields: dict[str, Any] = {
        "per_device_train_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        "use_cpu": resolved.accelerator.name == "cpu",
    }
    for field, path in LEAVES.items():
        value = get_path(config, path)
        if value is None and path == LR:
            value = get_path(config, PEAK)
        if value is None:
            names = HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),))
            value = next(
                (hyperparameters.get((n,)) for n in names if hyperparameters.get((n,)) is not None), None
            )
        if value is not None and not isinstance(value, list):
            fields[field] = value
    betas = get_path(config, BETAS) or hyperparameters.get(("betas",))
    if betas is None:
        betas = [hyperparameters.get((name,)) for name in BETA_FIELDS]
    fields.update(zip(BETA_FIELDS, betas, strict=True))
    for name in PRECISIONS:
        fields[name] = get_path(config, (name, "enabled")) is True
    if resolved.torch_compile:
        fields["torch_compile"] = True
    return fields


def _contradictions(given: Given, fields: Mapping[str, Any], resolved: ResolvedConfig) -> Iterator[Problem]:
    for field, place in given.stated.items():
        value = given.values[field]
        if field not in fields or _same(field, value, fields[field]):
            continue
        final = fields[field]
        message = f"differs from {shown(final)}, {_where_from(field, resolved)}"
        fix = f"keep one of them: remove {field} here, or write {shown(final)}"
        yield Problem(key=place, value=value, message=message, fix=fix, code=STATED_TWICE)


def _same(field: str, value: Any, final: Any) -> bool:
    value = getattr(value, "value", value)  # of an enum
    if field == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return True  # a share of all steps, which was counted
    return bool(value == final) or (field == "warmup_steps" and not value and final == 1)


def _where_from(field: str, resolved: ResolvedConfig) -> str:
    """Where the value came from that an argument differs from."""
    path = LEAVES.get(field) or BATCH.get(field) or dict.fromkeys(BETA_FIELDS, BETAS).get(field)
    if field in PRECISIONS:
        path = (field, "enabled")
    if path is not None and resolved.ds.get(path) is not None:
        return f"the DeepSpeed JSON's {dotted(path)} ({resolved.ds.origin(path)})"
    if path is not None:
        names = HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),))
        name = next((name for name in names if resolved.hyperparameters.get((name,)) is not None), names[0])
        return f"hyperparameters.{name} ({resolved.hyperparameters.origin((name,))})"
    if field == "use_cpu":
        return f"since the ranks compute on {resolved.accelerator.name}"
    of_fit = {"eval": "validation_period", "save": "checkpoint_period", "logg": "reporting_period"}
    name = "save_total_limit" if field == "save_total_limit" else of_fit.get(field[:4], "max_length")
    return f"hyperparameters.fit.{name} ({resolved.hyperparameters.origin(('fit', name))})"


def _two_rates(resolved: ResolvedConfig) -> Iterator[Problem]:
    """transformers has one learning rate, for the optimizer and for the end of a warm-up."""
    rate, peak = resolved.ds.get(LR), resolved.ds.get(PEAK)
    if None not in (rate, peak) and rate != peak:
        message = f"transformers trains with one rate, and {dotted(LR)} is {rate} ({resolved.ds.origin(LR)})"
        fix = 'write "auto" for one of them'
        yield resolved.ds.problem(PEAK, message, fix, STATED_TWICE)


def _other_total(resolved: ResolvedConfig, deferred: list[KeyPath]) -> Iterator[Problem]:
    """transformers requires a schedule that is as long as training; in epochs, only it can compare them."""
    total, length = resolved.ds.get(TOTAL), resolved.fit.max_length
    if (
        total is None
        or TOTAL in deferred
        or length is None
        or length.unit != "batches"
        or total == length.value
    ):
        return
    message = f"transformers requires the length of training, {length.value}"
    yield resolved.ds.problem(TOTAL, message, f'write {length.value}, or "auto"', "hf-total")


def _not_used(given: Given, resolved: ResolvedConfig) -> Iterator[Problem]:
    """Arguments that transformers ignores, since the JSON decides: each must mean the same."""
    for field, path, same in (
        ("lr_scheduler_type", ("scheduler", "type"), SCHEDULES),
        ("optim", ("optimizer", "type"), None),
    ):
        kind = resolved.ds.get(path)
        if field not in given.stated or kind is None:
            continue
        value = str(getattr(given.values[field], "value", given.values[field]))
        if value in same.get(kind, ()) if same else value.split("_")[0] == str(kind).lower():
            continue
        message = (
            f"is not used: the DeepSpeed JSON states {dotted(path)} = {kind} ({resolved.ds.origin(path)})"
        )
        fix = f"remove it here, or the section {path[0]} there"
        yield Problem(key=given.stated[field], value=value, message=message, fix=fix, code=STATED_TWICE)
