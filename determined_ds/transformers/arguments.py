"""``TrainingArguments`` of transformers, filled from the trial's hyperparameters and its DeepSpeed JSON.

What the arguments state, and what they have by default, fills the JSON where neither it nor a hyperparameter says
otherwise; the whole is decided like any other configuration. The arguments are then set to what was decided, so that
transformers finds both to agree, and itself fills the ``"auto"`` that depend on the model or on the length of training.

Source: ``HfTrainerDeepSpeedConfig`` in transformers 5.23's ``integrations/deepspeed.py``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from determined_ds.config.fill import CLIPPING, LR, PARAMS, START, overwrites, place_of_rate
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import (
    AUTO,
    LARGEST,
    PARALLEL_SIZES,
    FitOptions,
    by_real_names,
    parse_hyperparameters,
)
from determined_ds.config.resolve import ResolvedConfig, Where, reconcile
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document, KeyPath, unknown_key
from determined_ds.documents.files import read_json
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem, shown
from determined_ds.train.group.process_group import load_deepspeed
from determined_ds.train.here import Here, here, script_run

logger = logging.getLogger("determined_ds")

ARGUMENTS, STATED_TWICE = "TrainingArguments", "stated-twice"
SECTION = "training_arguments"  # of the hyperparameters: arguments by their own names
WARMUP: KeyPath = ("scheduler", "params", "warmup_num_steps")
TOTAL_STEPS: KeyPath = ("scheduler", "params", "total_num_steps")
# Argument -> its value in the DeepSpeed JSON, and the hyperparameters that state it. What the argument states goes to
# the last of them where nothing else says it; without any, into the JSON.
SAME: dict[str, tuple[KeyPath, ...]] = {
    "learning_rate": (LR, ("learning_rate",), ("lr",)),
    "weight_decay": ((*PARAMS, "weight_decay"), ("weight_decay",)),
    "adam_epsilon": ((*PARAMS, "eps"), ("eps",), ("adam_epsilon",)),
    "adam_beta1": ((*PARAMS, "betas", 0), ("betas", 0), ("adam_beta1",)),
    "adam_beta2": ((*PARAMS, "betas", 1), ("betas", 1), ("adam_beta2",)),
    "max_grad_norm": (CLIPPING, ("gradient_clipping",), ("max_grad_norm",)),
    "warmup_steps": (WARMUP, ("warmup_num_steps",), ("warmup_steps",)),
    "per_device_train_batch_size": (("train_micro_batch_size_per_gpu",),),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",),),
    "bf16": (("bf16", "enabled"),),
    "fp16": (("fp16", "enabled"),),
}
# Those that fill with their defaults, too; of Adam, and where no batch is stated, more of them.
ALWAYS = {"learning_rate", "max_grad_norm", "warmup_steps"}
OF_ADAM = {"weight_decay", "adam_epsilon", "adam_beta1", "adam_beta2"}
OF_BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps"}
# Filled from the model. Below ZeRO 3 transformers fills only the first of them, and nothing reads the others.
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# Of fit -> the beginning of two arguments: NAME_strategy and NAME_steps.
PERIODS = {"validation_period": "eval", "checkpoint_period": "save", "reporting_period": "logging"}
# Of --test: one batch is trained, one evaluated, one checkpoint saved.
ONE_STEP = {
    **{f"{start}_strategy": "steps" for start in PERIODS.values()},
    **{f"{start}_steps": 1 for start in (*PERIODS.values(), "max")},
    "eval_on_start": False,
}
# Hyperparameters of this library that transformers' Trainer cannot carry out.
NOT_READ: tuple[KeyPath, ...] = (
    *((name,) for name in PARALLEL_SIZES),
    ("fit", "asynchronous_checkpoints"),
    ("fit", "profile"),
)


def trial_here() -> Here | None:
    """The trial that this process trains; None where neither a cluster nor ``det-ds run`` has started it.

    Raises:
        ConfigError: on a cluster, the ranks are not those that the experiment requests.
    """
    trial = here()
    if trial is not None:
        trial.check_ranks(num_ranks())
    return trial


def accelerator_here(*, use_cpu: bool) -> Accelerator:
    """What this rank computes on, ``use_cpu`` being transformers' argument; DeepSpeed is loaded for it."""
    run = script_run()
    found = detect_accelerator("cpu" if use_cpu else run.accelerator if run else None)
    load_deepspeed(found.name)
    return found


def num_ranks() -> int:
    """The ranks in all, by the launcher's variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_chief() -> bool:
    """Whether this is rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def placed(output_dir: str | None) -> str | None:
    """Where transformers writes: off-cluster, a relative folder is one of the run directory.

    Two runs of one script, as those of a search, would overwrite each other's checkpoints otherwise.
    """
    run = script_run()
    if run is None or (output_dir is not None and Path(output_dir).is_absolute()):
        return output_dir
    return str(run.run_dir.absolute() / (output_dir or "trainer_output"))


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
        defaults = _defaults_of(type(self))
        named = dict(zip(defaults, args, strict=False)) | kwargs
        # A parser of command lines hands on all of them; what is at its default was probably not stated.
        is_parsed = len(named) == len(defaults)
        stated = [name for name in named if not (is_parsed and named[name] == defaults.get(name))]
        self._stated = {name: f"{ARGUMENTS}.{name}" for name in stated}
        super().__init__(*args, **kwargs)

    def __post_init__(self) -> None:
        trial = trial_here()
        if trial is not None:
            self._reconcile(trial)
        super().__post_init__()  # type: ignore[misc]
        found = getattr(getattr(self, "hf_deepspeed_config", None), "mismatches", ())
        if trial is not None and found:  # transformers would report them once the model is built
            fix, key = 'write "auto" for these values in the DeepSpeed JSON', f"{ARGUMENTS}.deepspeed"
            message = f"transformers finds mismatches: {'; '.join(found)}"
            raise ConfigError(Problem(key=key, message=message, fix=fix, code=STATED_TWICE))

    def __getstate__(self) -> dict[str, Any]:
        """``training_args.bin`` of a checkpoint: what transformers writes there."""
        return {name: value for name, value in vars(self).items() if name not in ("resolved", "_stated")}

    def _reconcile(self, trial: Here) -> None:
        """Decide what runs, and set the arguments to it; where there is a JSON, hand it to transformers."""
        fields, hyperparameters = vars(self), self._take_section(trial.hyperparameters)
        where = Where(
            context_dir=Path.cwd(),
            accelerator=accelerator_here(use_cpu=bool(fields.get("use_cpu"))),
            slots=num_ranks(),
            machines=int(os.environ.get("CROSS_SIZE") or os.environ.get("GROUP_WORLD_SIZE") or 1),
        )
        ds = _deepspeed_json(fields.get("deepspeed"), hyperparameters, where)
        named = by_real_names(hyperparameters)[0]
        own, stated = parse_hyperparameters(named), ds or Document(name="the DeepSpeed JSON", data={})
        of_fit, problems = _carried_out(hyperparameters, own.fit)
        if problems:
            raise ConfigError(problems)
        changes = overwrites(stated, named, own)
        seen = stated.overwritten(*changes)

        # The arguments fill what nothing else states.
        filling = ALWAYS | set(self._stated)
        filling |= OF_ADAM if str(seen.get(("optimizer", "type"))).lower() in ("adam", "adamw") else set()
        if own.global_batch_size is None and _is_open(seen, ("train_batch_size",)):
            filling |= OF_BATCH
        is_share = False  # of the training, which transformers will know: the warm-up
        for name, (path, *places) in SAME.items():
            is_said = not all(_is_open(hyperparameters, place) for place in places)
            if is_said or not _is_open(seen, _place_in(seen, path)) or name not in filling:
                continue
            value, origin = fields[name], self._stated.get(name, f"{ARGUMENTS}.{name}")
            if name == "warmup_steps":
                is_share, value = value < 1, max(1, int(value))
            if places:
                hyperparameters = hyperparameters.overwritten((places[-1], value, origin))
            else:
                stated = stated.overwritten((path, value, origin))
        if is_share and seen.get(START) == AUTO:
            stated = stated.overwritten((START, 0.0, "transformers"))
        if _is_open(hyperparameters, (TOTAL_STEPS[-1],)):  # not known yet
            hyperparameters = hyperparameters.overwritten(((TOTAL_STEPS[-1],), LARGEST, "transformers"))

        self.resolved = reconcile(
            hyperparameters,
            stated,
            slots=where.slots or 1,
            accelerator=where.accelerator,
            machines=where.machines,
        )
        decided = self.resolved.ds
        for name, (path, *places) in SAME.items():
            said = [(decided, _place_in(decided, path)), *((hyperparameters, place) for place in places)]
            found = [(document, at) for document, at in said if not _is_open(document, at)]
            if found and not (name == "warmup_steps" and is_share):
                problems += self._set(name, *found[0])
        for name, value in of_fit.items() if hyperparameters.get(("fit",)) else ():
            problems += self._set(name, hyperparameters, ("fit",), value)
        if own.torch_compile:
            problems += self._set("torch_compile", hyperparameters, ("torch_compile",))
        if problems:
            raise ConfigError(problems)

        fields["use_cpu"] = where.accelerator.name == "cpu"
        if ds is not None or changes:  # what only transformers can fill, once it has the model, stays "auto"
            opened = (
                [TOTAL_STEPS] if _is_open(seen, TOTAL_STEPS) and not _is_open(decided, TOTAL_STEPS) else []
            )
            opened += [WARMUP] if is_share and not _is_open(decided, WARMUP) else []
            buckets = BUCKETS if decided.get(("zero_optimization", "stage")) == 3 else BUCKETS[:1]
            places = [("zero_optimization", key) for key in buckets]
            opened += [path for path in places if seen.get(path) == AUTO]
            given = decided.overwritten(*((path, AUTO, "transformers") for path in opened))
            # accelerate requires the section.
            fields["deepspeed"] = {"zero_optimization": {"stage": 0}, **as_plain(given.data)}
        if is_chief() and script_run() is None:  # det-ds run has shown them
            for warning in self.resolved.warnings:
                logger.warning("warning: %s", warning)
        self._take_surroundings(trial, own.fit)

    def _take_section(self, hyperparameters: Document) -> Document:
        """Take ``hyperparameters.training_arguments``: arguments by their own names, as Determined's examples have.

        Returns:
            The hyperparameters, with the length of training where only the arguments state it.
        """
        defaults, problems = _defaults_of(type(self)), []
        for name, value in (hyperparameters.get((SECTION,)) or {}).items():
            path = (SECTION, name)
            if name not in defaults:
                problems.append(unknown_key(hyperparameters, path, defaults))
                continue
            is_text = isinstance(defaults[name], float) and isinstance(value, str)  # 1e-5 is a text to YAML
            problems += self._set(name, hyperparameters, path, float(value) if is_text else value)
            self._stated[name] = f"{hyperparameters.key(path)} ({hyperparameters.origin(path)})"
        if problems:
            raise ConfigError(problems)
        steps, epochs = vars(self).get("max_steps") or -1, vars(self).get("num_train_epochs") or 0
        if hyperparameters.get(("fit", "max_length")) is None and (steps > 0 or epochs >= 1):
            length = {"batches": int(steps)} if steps > 0 else {"epochs": int(epochs)}
            hyperparameters = hyperparameters.overwritten((("fit", "max_length"), length, ARGUMENTS))
        return hyperparameters

    def _set(self, name: str, document: Document, path: KeyPath, value: Any = NOT_GIVEN) -> list[Problem]:
        """Set an argument to what a document says. Returns a problem where another value is stated for it."""
        value = document.get(path) if value is NOT_GIVEN else value
        given = getattr(self, name, None)
        given = getattr(given, "value", given)  # of an enum
        setattr(self, name, value)
        if name not in self._stated or given == value:
            return []
        message = f"differs from {shown(value)}, {document.key(path)} ({document.origin(path)})"
        fix = f"keep one of them: remove {name} here, or write {shown(value)}"
        return [Problem(key=self._stated[name], value=given, message=message, fix=fix, code=STATED_TWICE)]

    def _take_surroundings(self, trial: Here, fit: FitOptions) -> None:
        """Set what follows from the trial, where nobody states it: the seed, the best metric, the folder."""
        fields, metric = vars(self), trial.searcher.get("metric")
        fields["output_dir"] = placed(fields.get("output_dir"))
        unstated: dict[str, Any] = {"seed": trial.seed}
        if metric and str(fields.get("eval_strategy", "no")).rpartition(".")[2].lower() not in ("no", ""):
            unstated["metric_for_best_model"] = str(metric)
            unstated["greater_is_better"] = trial.searcher.get("smaller_is_better") is False
        if not sys.stderr.isatty():  # a bar would fill a log
            transformers.utils.logging.disable_progress_bar()
            unstated["disable_tqdm"] = True
        if fit.stop_on_nan:
            unstated["logging_nan_inf_filter"] = False  # it would report earlier losses in place of NaN
        fields.update({name: value for name, value in unstated.items() if name not in self._stated})
        if trial.run is not None and trial.run.test:
            fields.update(ONE_STEP)


class TrainingArguments(ReconciledArguments, transformers.TrainingArguments):
    """``transformers.TrainingArguments``, completed by the hyperparameters of the trial."""


class Seq2SeqTrainingArguments(ReconciledArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments``, completed by the hyperparameters of the trial."""


def _is_open(document: Document, path: KeyPath) -> bool:
    """Whether a document says nothing at a path."""
    return document.get(path) in (None, AUTO)


def _place_in(ds: Document, path: KeyPath) -> KeyPath:
    """Where a JSON states a value: the rate may be the schedule's."""
    return (place_of_rate(ds) or LR) if path == LR else path


def _deepspeed_json(stated: Any, hyperparameters: Document, where: Where) -> Document | None:
    """The DeepSpeed JSON of the argument or of the hyperparameters, as it is written; None where there is none."""
    ds, path = None, ("deepspeed_config",)
    if isinstance(stated, Mapping):
        ds = Document(name=f"{ARGUMENTS}.deepspeed", data=as_plain(dict(stated)))
    elif stated:
        ds = read_json(Path(stated))
    if hyperparameters.get(path) is None:
        return ds
    there = where.deepspeed_json(hyperparameters)
    if ds is not None and ds.data != there.data:
        message = f"differs from {hyperparameters.key(path)} ({hyperparameters.origin(path)})"
        fix, key = "keep one of them: leave deepspeed out", f"{ARGUMENTS}.deepspeed"
        raise ConfigError(Problem(key=key, message=message, fix=fix, code=STATED_TWICE))
    return there


def _carried_out(hyperparameters: Document, fit: FitOptions) -> tuple[dict[str, Any], list[Problem]]:
    """The arguments that ``fit`` determines, and what transformers' Trainer cannot carry out."""
    fields: dict[str, Any] = {"eval_on_start": True} if fit.step_zero_validation else {}
    message, fix = "is not carried out by transformers' Trainer", "leave it out"
    problems = [
        hyperparameters.problem(path, message, fix, "hf-unread")
        for path in NOT_READ
        if hyperparameters.get(path) not in (None, AUTO, 1, False)
    ]
    if (length := fit.max_length) is not None and length.unit == "batches":
        fields["max_steps"] = length.value
    elif length is not None:
        fields |= {"max_steps": -1, "num_train_epochs": length.value}
    for name, start in PERIODS.items():
        period = getattr(fit, name)
        if period is not None and period.unit == "batches" and isinstance(period.value, int):
            fields |= {f"{start}_strategy": "steps", f"{start}_steps": period.value}
        elif period is not None and (period.unit, period.value) == ("epochs", 1):
            fields[f"{start}_strategy"] = "epoch"
        elif period is not None:
            message = "transformers has periods of batches, or of one epoch"
            fix = f"write {name}: {{batches: N}}, or {{epochs: 1}}"
            problems.append(hyperparameters.problem(("fit", name), message, fix, "hf-period"))
    fields |= {} if fit.save_total_limit is None else {"save_total_limit": fit.save_total_limit}
    return fields, problems


def _defaults_of(kind: type) -> dict[str, Any]:
    """The arguments of a class, with their defaults."""
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    made = {
        each.name: each.default_factory for each in fields if each.default_factory is not dataclasses.MISSING
    }
    return {each.name: made[each.name]() if each.name in made else each.default for each in fields}
