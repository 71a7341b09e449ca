"""``TrainingArguments`` of transformers, filled from the trial's hyperparameters and its DeepSpeed JSON.

The arguments take what the hyperparameters or the JSON state. transformers then fills the ``"auto"`` of the JSON from
its arguments, as it always does, and what comes out is held to the same rules as any other configuration.

Source: ``HfTrainerDeepSpeedConfig`` in transformers 5.23's ``integrations/deepspeed.py``.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import inspect
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from determined_ds.config.fill import HYPERPARAMETER_NAMES, LR, leaf_paths, overwrites, place_of_rate
from determined_ds.config.params import (
    AUTO,
    LARGEST,
    OVERWRITES,
    PARALLEL_SIZES,
    SHORTHANDS,
    Duration,
    FitOptions,
    Hyperparameters,
    Length,
    parse_hyperparameters,
)
from determined_ds.config.resolve import ResolvedConfig, Where, reconcile
from determined_ds.documents.document import Document, KeyPath, get_path, unknown_key
from determined_ds.documents.files import read_json
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, shown
from determined_ds.train.here import script_run
from determined_ds.transformers.here import (
    TrialHere,
    accelerator_here,
    is_chief,
    num_machines,
    num_ranks,
    placed,
    trial_here,
)

logger = logging.getLogger("determined_ds")

ARGUMENTS, STATED_TWICE = "TrainingArguments", "stated-twice"
SECTION = "training_arguments"  # of the hyperparameters: arguments by their own names
MICRO, ACCUMULATION = ("train_micro_batch_size_per_gpu",), ("gradient_accumulation_steps",)
SCHEDULE: KeyPath = ("scheduler", "params")
WARMUP, TOTAL = (*SCHEDULE, "warmup_num_steps"), (*SCHEDULE, "total_num_steps")
# Argument -> the value of the DeepSpeed JSON that transformers fills from it.
LEAVES: dict[str, KeyPath] = {
    "learning_rate": LR,
    "adam_epsilon": ("optimizer", "params", "eps"),
    "weight_decay": ("optimizer", "params", "weight_decay"),
    "max_grad_norm": ("gradient_clipping",),
    "warmup_steps": WARMUP,
}
BETAS: KeyPath = ("optimizer", "params", "betas")
# Values that transformers fills where they are "auto", and leaves to DeepSpeed's defaults where they are absent.
FILLED = {
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "warmuplr": ("warmup_max_lr", "warmup_num_steps"),
    "warmupdecaylr": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "warmupcosinelr": ("warmup_num_steps", "total_num_steps"),
}
# Of fit -> the beginning of two arguments: NAME_strategy and NAME_steps.
PERIODS = {"validation_period": "eval", "checkpoint_period": "save", "reporting_period": "logging"}
# Of --test: one batch is trained, one evaluated, one checkpoint saved.
ONE_STEP = {
    **{f"{start}_strategy": "steps" for start in PERIODS.values()},
    **{f"{start}_steps": 1 for start in (*PERIODS.values(), "max")},
    "eval_on_start": False,
}


class ReconciledArguments:
    """What makes a class of arguments take the hyperparameters of its trial; put it before that class.

    ``class Arguments(ReconciledArguments, trl.SFTConfig)``. Under a plain launcher, without a trial, it does nothing.

    Attributes:
        resolved: What was decided; None without a trial.

    Raises:
        ConfigError: every reason why it cannot run, and every value that is stated twice, with both places.
    """

    resolved: ResolvedConfig | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        named = dict(zip(names, args, strict=False)) | kwargs
        # A parser of command lines hands on all of them; what is at its default was probably not stated.
        is_parsed, defaults = len(named) == len(names), _defaults_of(type(self))
        self._stated = {
            name: f"{ARGUMENTS}.{name}"
            for name, value in named.items()
            if not (is_parsed and value == defaults.get(name))
        }
        super().__init__(*args, **kwargs)

    def __post_init__(self) -> None:
        trial = trial_here()
        if trial is None:
            super().__post_init__()  # type: ignore[misc]
            return
        hyperparameters = self._take_section(trial.hyperparameters)
        own = parse_hyperparameters(hyperparameters)
        accelerator = accelerator_here(use_cpu=bool(vars(self).get("use_cpu")))
        where = Where(
            context_dir=Path.cwd(), accelerator=accelerator, slots=num_ranks(), machines=num_machines()
        )
        ds = self._deepspeed_json(hyperparameters, own, where)
        self._take_values(hyperparameters, own, ds, where)
        self._take_surroundings(trial, own)
        super().__post_init__()  # type: ignore[misc]
        self._decide(hyperparameters, ds, where)

    def __getstate__(self) -> dict[str, Any]:
        """``training_args.bin`` of a checkpoint: what transformers writes there."""
        return {name: value for name, value in vars(self).items() if name not in ("resolved", "_stated")}

    def _take_section(self, hyperparameters: Document) -> Document:
        """Take ``hyperparameters.training_arguments``: arguments by their own names, as Determined's examples have.

        Returns:
            The hyperparameters, with the length of training where only the arguments state it.
        """
        section, defaults = hyperparameters.get((SECTION,)), _defaults_of(type(self))
        problems = []
        for name, value in section.items() if isinstance(section, dict) else ():
            path = (SECTION, name)
            if name not in defaults:
                problems.append(unknown_key(hyperparameters, path, defaults))
                continue
            if isinstance(defaults[name], float) and isinstance(value, (str, int)) and value is not True:
                value = float(value)  # 1e-5 is a text to YAML
            if name in self._stated and getattr(self, name) != value:
                message = f"differs from {self._stated[name]} = {shown(getattr(self, name))}"
                problems.append(hyperparameters.problem(path, message, "keep one of them", STATED_TWICE))
                continue
            setattr(self, name, value)
            self._stated[name] = f"{hyperparameters.key(path)} ({hyperparameters.origin(path)})"
        if problems:
            raise ConfigError(problems)
        steps, epochs = vars(self).get("max_steps") or -1, vars(self).get("num_train_epochs") or 0
        if hyperparameters.get(("fit", "max_length")) is None and (steps > 0 or epochs >= 1):
            length = {"batches": int(steps)} if steps > 0 else {"epochs": int(epochs)}
            hyperparameters = hyperparameters.overwritten((("fit", "max_length"), length, ARGUMENTS))
        return hyperparameters

    def _deepspeed_json(
        self, hyperparameters: Document, own: Hyperparameters, where: Where
    ) -> Document | None:
        """The DeepSpeed JSON with the hyperparameters that overwrite it; None where there is none."""
        stated = vars(self).get("deepspeed")
        ds = None if not stated else _read_deepspeed(stated)
        if hyperparameters.get(("deepspeed_config",)) is not None:
            there = where.deepspeed_json(hyperparameters)
            if ds is not None and ds.data != there.data:
                origin = hyperparameters.origin(("deepspeed_config",))
                message = f"is another configuration than hyperparameters.deepspeed_config ({origin})"
                fix, key = "keep one of them: leave deepspeed out", f"{ARGUMENTS}.deepspeed"
                raise ConfigError(Problem(key=key, message=message, fix=fix, code=STATED_TWICE))
            ds = there
        return None if ds is None else ds.overwritten(*overwrites(ds, hyperparameters, own))

    def _take_values(
        self, hyperparameters: Document, own: Hyperparameters, ds: Document | None, where: Where
    ) -> None:
        """Set the arguments that the JSON or the hyperparameters state, and hand the JSON to transformers."""
        fields, json_ = vars(self), ds or Document(name="the DeepSpeed JSON", data={})
        decided: dict[str, tuple[Any, str]] = {}  # argument -> its value, and where that is stated

        def in_json(path: KeyPath) -> Any:
            value = json_.get(path)
            return None if value == AUTO or isinstance(value, dict) else value

        def of(document: Document, path: KeyPath) -> str:
            return f"{document.key(path)} ({document.origin(path)})"

        rate = place_of_rate(json_)
        for field, path in LEAVES.items():
            path = rate if rate is not None and path == LR else path
            if (value := in_json(path)) is not None and not isinstance(value, list):
                decided[field] = value, of(json_, path)
                continue
            for name in HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),)):
                if (value := hyperparameters.get((name,))) not in (None, AUTO):
                    decided[field] = value, of(hyperparameters, (name,))
                    break
        betas = in_json(BETAS) or hyperparameters.get(("betas",)) or (None, None)
        for field, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            if value is not None:
                place = of(json_, BETAS) if in_json(BETAS) else of(hyperparameters, ("betas",))
                decided[field] = value, place
            elif hyperparameters.get((field,)) is not None:
                decided[field] = hyperparameters.get((field,)), of(hyperparameters, (field,))
        for name in ("bf16", "fp16"):
            if (value := in_json((name, "enabled"))) is not None:
                decided[name] = value, of(json_, (name, "enabled"))
        stated_precision = {"bf16", "fp16"} & {*self._stated, *(name for name in decided if decided[name][0])}
        if json_.get(("bf16", "enabled")) == AUTO and not stated_precision:
            decided["bf16"] = where.accelerator.bf16, f"what {where.accelerator.name} computes in"
        decided["use_cpu"] = where.accelerator.name == "cpu", f"the ranks compute on {where.accelerator.name}"
        for name, value in _fields_of_fit(own.fit, hyperparameters.get(("fit",)) or {}).items():
            decided[name] = value, of(hyperparameters, ("fit",))
        if own.torch_compile:
            decided["torch_compile"] = True, of(hyperparameters, ("torch_compile",))

        problems = [
            *self._batch(own, in_json, hyperparameters),
            *_not_of_transformers(hyperparameters, own.fit),
        ]
        for field, (value, place) in decided.items():
            given = fields.get(field)
            given = getattr(given, "value", given)  # of an enum
            if field in self._stated and given != value:
                message = f"differs from {shown(value)}, {place}"
                fix = f"keep one of them: remove {field} here, or write {shown(value)}"
                key = self._stated[field]
                problems.append(Problem(key=key, value=given, message=message, fix=fix, code=STATED_TWICE))
            fields[field] = value
        for field, section in (("lr_scheduler_type", "scheduler"), ("optim", "optimizer")):
            if field in self._stated and json_.get((section, "type")) is not None:
                message = f"is not used: the DeepSpeed JSON has a section {section}"
                fix = f"remove it here, or the section {section} there"
                key, given = self._stated[field], str(getattr(fields[field], "value", fields[field]))
                problems.append(Problem(key=key, value=given, message=message, fix=fix, code=STATED_TWICE))
        if problems:
            raise ConfigError(problems)
        if ds is not None:
            fields["deepspeed"] = _open_to_transformers(ds, fields)

    def _batch(self, own: Hyperparameters, in_json: Any, hyperparameters: Document) -> list[Problem]:
        """Set the micro-batch and the accumulation from the global batch, where they are open."""
        fields, per_device, accumulated = (
            vars(self),
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
        )
        total, sizes = own.global_batch_size or in_json(("train_batch_size",)), {}
        for field, path in ((per_device, MICRO), (accumulated, ACCUMULATION)):
            value = sizes[field] = in_json(path)
            if field in self._stated and value not in (None, fields[field]):
                key, given = self._stated[field], fields[field]
                message = f"differs from {path[0]} = {value} in the DeepSpeed JSON"
                return [
                    Problem(key=key, value=given, message=message, fix="keep one of them", code=STATED_TWICE)
                ]
            if value is None and (field in self._stated or (field == per_device and not total)):
                sizes[field] = fields[field]
        micro, accumulation = sizes[per_device], sizes[accumulated]
        if total and None in (micro, accumulation):
            known = num_ranks() * (micro or accumulation or 1)
            if total % known:
                message = f"must be a multiple of {known}: ranks, and micro-batch or accumulation"
                fix = f"write {max(1, total // known) * known} or {(total // known + 1) * known}"
                return [hyperparameters.problem(("global_batch_size",), message, fix, "batch-indivisible")]
            if micro is None:
                micro, accumulation = total // known, accumulation or 1
            else:
                accumulation = total // known
        fields[per_device], fields[accumulated] = micro, accumulation or 1
        return []

    def _take_surroundings(self, trial: TrialHere, own: Hyperparameters) -> None:
        """Set what follows from the trial, where nobody states it: the seed, the best metric, the folder."""
        fields, metric = vars(self), trial.task.searcher.get("metric")
        fields["output_dir"] = placed(fields.get("output_dir"))
        unstated: dict[str, Any] = {"seed": trial.task.seed}
        if metric and str(fields.get("eval_strategy", "no")).rpartition(".")[2].lower() not in ("no", ""):
            unstated["metric_for_best_model"] = str(metric)
            unstated["greater_is_better"] = trial.task.searcher.get("smaller_is_better") is False
        if not sys.stderr.isatty():  # a bar would fill a log
            transformers.utils.logging.disable_progress_bar()
            unstated["disable_tqdm"] = True
        if own.fit.stop_on_nan:
            unstated["logging_nan_inf_filter"] = False  # it would report earlier losses in place of NaN
        fields.update({name: value for name, value in unstated.items() if name not in self._stated})
        if trial.run is not None and trial.run.test:
            fields.update(ONE_STEP)

    def _decide(self, hyperparameters: Document, ds: Document | None, where: Where) -> None:
        """Hold what transformers has filled to the rules of every configuration."""
        given = getattr(self, "hf_deepspeed_config", None)
        if given is not None and given.mismatches:  # it would report them once the model is built
            message = f"transformers finds mismatches: {'; '.join(given.mismatches)}"
            fix, key = 'write "auto" for these values in the DeepSpeed JSON', f"{ARGUMENTS}.deepspeed"
            raise ConfigError(Problem(key=key, message=message, fix=fix, code=STATED_TWICE))
        fields = vars(self)
        if given is None:
            sizes = (fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"])
            filled = Document(
                name="the arguments", data=dict(zip((MICRO[0], ACCUMULATION[0]), sizes, strict=True))
            )
        else:
            assert ds is not None
            filled = ds.holding(as_plain(given.config))
            later = {
                WARMUP: max(1, int(fields["warmup_steps"])),
                TOTAL: LARGEST,
                (*SCHEDULE, "warmup_min_lr"): 0.0,
            }
            filled = filled.overwritten(
                *((path, value, "transformers") for path, value in later.items() if filled.get(path) == AUTO)
            )
        for key in (OVERWRITES, *SHORTHANDS):  # they are in the JSON by now
            if hyperparameters.get((key,)) is not None:
                hyperparameters = hyperparameters.overwritten(((key,), NOT_GIVEN, ""))
        self.resolved = reconcile(
            hyperparameters,
            filled,
            slots=where.slots or 1,
            accelerator=where.accelerator,
            machines=where.machines,
        )
        if (
            given is not None
        ):  # what is filled beside: of Adam's implementations the one that compiles nothing
            for path in leaf_paths(self.resolved.ds.data):
                if get_path(given.config, path, NOT_GIVEN) is NOT_GIVEN:
                    section = given.config
                    for key in path[:-1]:
                        section = section.setdefault(key, {})
                    section[path[-1]] = self.resolved.ds.get(path)
        if is_chief() and script_run() is None:  # det-ds run has shown them
            for warning in self.resolved.warnings:
                logger.warning("warning: %s", warning)


class TrainingArguments(ReconciledArguments, transformers.TrainingArguments):
    """``transformers.TrainingArguments``, completed by the hyperparameters of the trial."""


class Seq2SeqTrainingArguments(ReconciledArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments``, completed by the hyperparameters of the trial."""


def plain_arguments_problems(args: Any, hyperparameters: Document) -> list[Problem]:
    """Hyperparameters of this library that arguments of transformers' own class did not take."""
    own, problems = parse_hyperparameters(hyperparameters), []
    fix = "use determined_ds.transformers.TrainingArguments, which takes the hyperparameters"
    if own.global_batch_size is not None:
        total = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        if total != own.global_batch_size:
            message = (
                f"differs from per_device_train_batch_size x gradient_accumulation_steps x ranks = {total}"
            )
            problems.append(hyperparameters.problem(("global_batch_size",), message, fix, STATED_TWICE))
    for name, value in _fields_of_fit(own.fit, hyperparameters.get(("fit",)) or {}).items():
        found = getattr(args, name, None)
        found = getattr(found, "value", found)
        if found != value and not (name == "max_steps" and value == -1):
            message = f"differs from {ARGUMENTS}.{name} = {shown(found)}"
            problems.append(hyperparameters.problem(("fit",), message, fix, STATED_TWICE))
    return problems


def _fields_of_fit(fit: FitOptions, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that ``fit`` determines; none where ``hyperparameters.fit`` states nothing."""
    fields: dict[str, Any] = {}
    if fit.max_length is not None:
        by_batches = fit.max_length.unit == "batches"
        fields["max_steps"] = fit.max_length.value if by_batches else -1
        if not by_batches:
            fields["num_train_epochs"] = fit.max_length.value
    for name, start in PERIODS.items():
        period: Length | Duration | None = getattr(fit, name)
        if isinstance(period, Length) and isinstance(period.value, int):
            fields[f"{start}_strategy"] = "steps" if period.unit == "batches" else "epoch"
            if period.unit == "batches":
                fields[f"{start}_steps"] = period.value
    if fit.step_zero_validation:
        fields["eval_on_start"] = True
    if fit.save_total_limit is not None:
        fields["save_total_limit"] = fit.save_total_limit
    return fields if stated else {}


def _not_of_transformers(hyperparameters: Document, fit: FitOptions) -> list[Problem]:
    """Hyperparameters of this library that transformers' Trainer cannot carry out."""
    problems = []

    def refuse(path: KeyPath, message: str, fix: str, code: str) -> None:
        problems.append(hyperparameters.problem(path, message, fix, code))

    for name in PARALLEL_SIZES:
        if hyperparameters.get((name,)) not in (None, AUTO, 1):
            message, fix = "transformers' Trainer trains replicas only", f"remove {name}, or write 1"
            refuse((name,), message, fix, "hf-replicas")
    if hyperparameters.get(("sdpa_kernel",)) not in (None, AUTO):
        fix = "remove it, and give attn_implementation to from_pretrained or from_config"
        refuse(("sdpa_kernel",), "is not read by transformers", fix, "hf-kernel")
    if fit.asynchronous_checkpoints:
        message = "transformers writes its checkpoints itself, and at once"
        refuse(("fit", "asynchronous_checkpoints"), message, "leave it out", "hf-asynchronous")
    if fit.profile is not None:
        message = "steps of transformers' Trainer are not recorded"
        refuse(("fit", "profile"), message, "leave it out, or train a trial or a session", "hf-profile")
    for name in PERIODS:
        period: Length | Duration | None = getattr(fit, name)
        is_one = isinstance(period, Length) and isinstance(period.value, int)
        if period is not None and not (is_one and (period.unit == "batches" or period.value == 1)):
            message = "transformers has periods of batches, or of one epoch"
            refuse(("fit", name), message, f"write {name}: {{batches: N}}, or {{epochs: 1}}", "hf-period")
    return problems


def _open_to_transformers(ds: Document, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON with ``"auto"`` wherever transformers may fill a value from its arguments."""
    config = {"zero_optimization": {"stage": 0}, **as_plain(ds.data)}  # accelerate requires the section
    for key in ("train_batch_size", *MICRO, *ACCUMULATION, "gradient_clipping"):
        config.setdefault(key, AUTO)
    zero = config["zero_optimization"]
    for key in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if (
            zero.get("stage") != 3 and zero.get(key) == AUTO
        ):  # transformers leaves it "auto", and nothing reads it
            del zero[key]
    for section in ("optimizer", "scheduler"):
        kind = str((config.get(section) or {}).get("type")).lower()
        for key in FILLED.get(kind, ()):
            config[section].setdefault("params", {}).setdefault(key, AUTO)
    for name in ("bf16", "fp16"):
        if fields.get(name):
            config.setdefault(name, {}).setdefault("enabled", AUTO)
    params = (config.get("scheduler") or {}).get("params") or {}
    steps = fields.get("warmup_steps") or 0
    if params.get("warmup_min_lr") == AUTO and steps >= 1:
        # From 0, which transformers would fill, DeepSpeed's first two steps would train nothing.
        params["warmup_min_lr"] = fields["learning_rate"] / steps
    if params.get("warmup_num_steps") == AUTO and steps >= 1:
        params["warmup_num_steps"] = int(steps)
    return config


def _defaults_of(kind: type) -> dict[str, Any]:
    """The arguments of a class, with their defaults."""
    plain: Any = next(each for each in kind.__mro__ if "__dataclass_fields__" in vars(each))
    parameters = inspect.signature(plain.__init__).parameters.values()
    found = {each.name: each.default for each in parameters if each.name != "self"}
    made = {
        field.name: field.default_factory()
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default_factory is not dataclasses.MISSING
    }
    return found | made


def _read_deepspeed(value: Any) -> Document:
    """``TrainingArguments.deepspeed``: a mapping, a path, or what transformers also takes, a JSON in base64."""
    if isinstance(value, Mapping):
        return Document(name=f"{ARGUMENTS}.deepspeed", data=as_plain(dict(value)))
    try:
        if not Path(value).exists():
            data = json.loads(base64.urlsafe_b64decode(value).decode())
            return Document(name=f"{ARGUMENTS}.deepspeed", data=data)
    except (OSError, ValueError, binascii.Error):  # not one: the path is reported
        pass
    return read_json(Path(value))
