"""``TrainingArguments`` of transformers, filled from the trial's hyperparameters and its DeepSpeed JSON.

An argument stands for a hyperparameter that nobody states. The whole is decided like any other configuration, and the
arguments are set to what was decided. What depends on the model or on the length of training stays ``"auto"`` in the
JSON, and transformers fills it.

Source: ``HfTrainerDeepSpeedConfig`` in transformers 5.23's ``integrations/deepspeed.py``.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from determined_ds.config.fill import CLIPPING, LR, PARAMS, START, overwrites, place_of_rate
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import (
    AUTO,
    LARGEST,
    OVERWRITES,
    PARALLEL_SIZES,
    Hyperparameters,
    by_real_names,
    parse_hyperparameters,
)
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Change, Document, KeyPath, unknown_key
from determined_ds.documents.files import read_json
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.train.group.process_group import load_deepspeed
from determined_ds.train.rank import Here, here, run_here

logger = logging.getLogger("determined_ds")

SECTION = "training_arguments"  # of the hyperparameters: arguments by their own names
WARMUP: KeyPath = ("scheduler", "params", "warmup_num_steps")
TOTAL_STEPS: KeyPath = ("scheduler", "params", "total_num_steps")
ACCUMULATION = "gradient_accumulation_steps"
# Argument -> its value in the DeepSpeed JSON, and hyperparameters that say it; it stands for the last of them.
SAME: dict[str, tuple[KeyPath, ...]] = {
    "learning_rate": (LR, ("learning_rate",), ("lr",)),
    "weight_decay": ((*PARAMS, "weight_decay"), ("weight_decay",)),
    "adam_epsilon": ((*PARAMS, "eps"), ("eps",), ("adam_epsilon",)),
    "adam_beta1": ((*PARAMS, "betas", 0), ("betas", 0), ("adam_beta1",)),
    "adam_beta2": ((*PARAMS, "betas", 1), ("betas", 1), ("adam_beta2",)),
    "max_grad_norm": (CLIPPING, ("gradient_clipping",), ("max_grad_norm",)),
    "warmup_steps": (WARMUP, ("warmup_num_steps",), ("warmup_steps",)),
    "per_device_train_batch_size": (("train_micro_batch_size_per_gpu",), ("micro_batch_size",)),
    "gradient_accumulation_steps": ((ACCUMULATION,), (OVERWRITES, ACCUMULATION)),
    "bf16": (("bf16", "enabled"), (OVERWRITES, "bf16", "enabled")),
    "fp16": (("fp16", "enabled"), (OVERWRITES, "fp16", "enabled")),
}
# Arguments whose default counts, too; where no batch is stated, two more.
ALWAYS = {"learning_rate", "weight_decay", "adam_epsilon", "adam_beta1", "adam_beta2", "max_grad_norm"}
OF_BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps"}
# "auto" that transformers fills from the model; below ZeRO 3 only the first, and nothing reads the others.
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# Of fit -> the beginning of two arguments: NAME_strategy and NAME_steps.
PERIODS = {"validation_period": "eval", "checkpoint_period": "save", "reporting_period": "logging"}
# Hyperparameters of this library that transformers' Trainer cannot carry out.
NOT_READ: list[KeyPath] = [
    *((name,) for name in PARALLEL_SIZES),
    *(("fit", name) for name in ("asynchronous_checkpoints", "profile", "profiling_enabled")),
    *(("fit", name) for name in ("on_spike", "skip_batches")),
]


def num_ranks() -> int:
    """The ranks in all, by the launcher's variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def warn(words: str, *about: Any) -> None:
    """Log a warning, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(f"warning: {words}", *about)


def trial_here() -> Here | None:
    """The trial that this process trains; None where neither a cluster nor ``det-ds run`` has started it."""
    trial = here()
    if trial is not None:
        trial.check_ranks(num_ranks())
    return trial


def accelerator_here(*, use_cpu: bool) -> Accelerator:
    """What this rank computes on, ``use_cpu`` being transformers' argument; DeepSpeed is loaded for it."""
    run = run_here()
    found = detect_accelerator("cpu" if use_cpu else run.accelerator if run else None)
    load_deepspeed(found.name)
    return found


def placed(output_dir: str | None) -> str | None:
    """Where transformers writes: off-cluster, a relative folder is one of the run directory."""
    run = run_here()  # two runs of one script would overwrite each other's checkpoints otherwise
    if run is None or (output_dir is not None and Path(output_dir).is_absolute()):
        return output_dir
    return str(run.run_dir.absolute() / (output_dir or "trainer_output"))


class ReconciledArguments:
    """What makes a class of arguments take the hyperparameters of its trial; put it before that class.

    ``class Arguments(ReconciledArguments, trl.SFTConfig)``. A hyperparameter, and a value of the DeepSpeed JSON,
    overrides the argument that the script states, with a warning. Under a plain launcher, without a trial, it does
    nothing.

    Attributes:
        resolved: What was decided; None without a trial.

    Raises:
        ConfigError: every reason why it cannot run.
    """

    resolved: ResolvedConfig | None = None

    def __post_init__(self) -> None:
        if (trial := trial_here()) is not None:
            self._reconcile(trial)
        super().__post_init__()  # type: ignore[misc]

    def _reconcile(self, trial: Here) -> None:
        """Decide what runs, and set the arguments to it; where there is a JSON, hand it to transformers."""
        fields, hyperparameters, problems = vars(self), trial.hyperparameters, list[Problem]()
        for name, value in (hyperparameters.get((SECTION,)) or {}).items():
            if name in fields:  # 1e-5 is a text to YAML
                is_text = isinstance(fields[name], float) and isinstance(value, str)
                self._set(name, float(value) if is_text else value)
            else:
                problems.append(unknown_key(hyperparameters, (SECTION, name), list(fields)))
        accelerator = accelerator_here(use_cpu=bool(fields.get("use_cpu")))
        if (stated := hyperparameters.get(("deepspeed_config",))) is not None:
            self._set("deepspeed", stated)
        elif (given := fields.get("deepspeed")) is not None:
            is_path = isinstance(given, (str, os.PathLike))
            stated = read_json(Path(given)).data if is_path else as_plain(dict(given))
            change = (("deepspeed_config",), stated, "TrainingArguments.deepspeed")
            hyperparameters = hyperparameters.overwritten(change)
        named = by_real_names(hyperparameters)[0]
        own = parse_hyperparameters(named)
        of_fit, more = _of_fit(own, hyperparameters)
        if problems := [*problems, *more]:
            raise ConfigError(problems)
        ds = Where(context_dir=Path.cwd(), accelerator=accelerator).deepspeed_json(hyperparameters)
        changes = overwrites(ds, named, own)
        ds = ds.overwritten(*changes)

        # What the JSON or a hyperparameter says is the argument; else the argument stands for the hyperparameter.
        filling = {name for name in SAME if not self._is_default(name)} | ALWAYS
        if own.global_batch_size is None and ds.get(("train_batch_size",)) in (None, AUTO):
            filling |= OF_BATCH
        # What transformers fills, once it has the model and knows the number of steps; decided by a value that fits.
        late, filled = list[KeyPath](), list[Change]()
        if hyperparameters.get((TOTAL_STEPS[-1],)) in (None, AUTO):
            late, filled = [TOTAL_STEPS], [((TOTAL_STEPS[-1],), LARGEST, "transformers")]
        for name, (path, *places) in SAME.items():
            at = (place_of_rate(ds) or LR) if path == LR else path
            found = [ds.get(at), *(hyperparameters.get(place) for place in places)]
            if said := [value for value in found if value not in (None, AUTO)]:
                self._set(name, said[0])
            elif name == "warmup_steps":  # it may be a share of them
                late += [WARMUP, START]
                filled.append((places[-1], 1, "transformers"))
            elif name in filling:
                filled.append((places[-1], fields[name], f"TrainingArguments.{name}"))
        machines = int(os.environ.get("CROSS_SIZE") or os.environ.get("GROUP_WORLD_SIZE") or 1)
        trial = replace(trial, hyperparameters=hyperparameters.overwritten(*filled))
        self.resolved = trial.resolve(accelerator, ranks=num_ranks(), machines=machines)

        decided = self.resolved.ds
        sizes = {name: decided.get(SAME[name][0]) for name in (*OF_BATCH, "bf16", "fp16")}
        for name, value in (sizes | of_fit).items():
            if value is not None:
                self._set(name, value)
        fields["use_cpu"] = accelerator.name == "cpu"
        if stated is not None or changes:
            late = [path for path in late if ds.get(path) in (None, AUTO) and decided.get(path) is not None]
            buckets = BUCKETS if self.resolved.zero_stage == 3 else BUCKETS[:1]
            late += [path for key in buckets if ds.get(path := ("zero_optimization", key)) == AUTO]
            left = decided.overwritten(*((path, AUTO, "transformers") for path in late))
            # accelerate requires the section.
            fields["deepspeed"] = {"zero_optimization": {"stage": 0}, **as_plain(left.data)}
        for warning in self.resolved.warnings if trial.run is None else ():  # det-ds run has shown them
            warn("%s", warning)

        # What follows from the trial, where the script does not state it.
        metric, unstated = trial.searcher.get("metric"), dict[str, Any](seed=trial.seed)
        if metric and fields["eval_strategy"] != "no":
            unstated["metric_for_best_model"] = str(metric)
            unstated["greater_is_better"] = trial.searcher.get("smaller_is_better") is False
        if not sys.stderr.isatty():  # a bar would fill a log
            transformers.utils.logging.disable_progress_bar()
            unstated["disable_tqdm"] = True
        if own.fit.stop_on_nan:
            unstated["logging_nan_inf_filter"] = False  # it would report earlier losses in place of NaN
        fields.update({name: each for name, each in unstated.items() if self._is_default(name)})
        fields["output_dir"] = placed(fields.get("output_dir"))
        if trial.run is not None and trial.run.test:
            for start in PERIODS.values():
                fields |= {f"{start}_strategy": "steps", f"{start}_steps": 1}
            fields |= {"max_steps": 1, "eval_on_start": False}

    def _is_default(self, name: str) -> bool:
        return bool(getattr(self, name) == getattr(type(self), name))

    def _set(self, name: str, value: Any) -> None:
        """Set an argument, and say so where the script states another value."""
        given = getattr(self, name)
        if given not in (value, getattr(type(self), name, given)):
            words = "TrainingArguments.%s = %s is not used: the experiment says %s"
            warn(words, name, shown(given), shown(value))
        setattr(self, name, value)


class TrainingArguments(ReconciledArguments, transformers.TrainingArguments):
    """``transformers.TrainingArguments``, completed by the hyperparameters of the trial."""


class Seq2SeqTrainingArguments(ReconciledArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments``, completed by the hyperparameters of the trial."""


def _of_fit(own: Hyperparameters, hyperparameters: Document) -> tuple[dict[str, Any], list[Problem]]:
    """The arguments that ``fit`` determines, None where it does not; and what the Trainer cannot carry out."""
    message, fix, fit = "is not carried out by transformers' Trainer", "leave it out", own.fit
    problems = [
        hyperparameters.problem(path, message, fix, "hf-unread")
        for path in NOT_READ
        if hyperparameters.get(path) not in (None, AUTO, 1, False)
    ]
    fields: dict[str, Any] = {
        "eval_on_start": fit.step_zero_validation or None,
        "save_total_limit": fit.save_total_limit,
        "torch_compile": own.torch_compile or None,
    }
    if (length := fit.max_length) is not None and length.unit == "batches":
        fields["max_steps"] = length.value
    elif length is not None:
        fields |= {"max_steps": -1, "num_train_epochs": length.value}
    for name, start in PERIODS.items():
        period = getattr(fit, name)
        if period is None:
            continue
        if period.unit == "batches" and isinstance(period.value, int):
            fields |= {f"{start}_strategy": "steps", f"{start}_steps": period.value}
        elif (period.unit, period.value) == ("epochs", 1):
            fields[f"{start}_strategy"] = "epoch"
        else:
            message = "transformers has periods of batches, or of one epoch"
            fix = f"write {name}: {{batches: N}}, or {{epochs: 1}}"
            problems.append(hyperparameters.problem(("fit", name), message, fix, "hf-period"))
    return fields, problems
