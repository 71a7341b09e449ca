"""``TrainingArguments`` of transformers, filled from the trial's hyperparameters and its DeepSpeed JSON."""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import inspect
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

from determined_ds.config.fill import leaf_paths
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import Document, dotted, get_path, plain_copy, unknown_key
from determined_ds.documents.files import read_json
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.train.scripts.given_run import script_run
from determined_ds.transformers.filling import ARGUMENTS, STATED_TWICE, Filled, Given, fill
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
SECTION = "training_arguments"  # of the hyperparameters: arguments by their own names
# Of --test: one batch is trained, one evaluated, one checkpoint saved.
ONE_STEP = {
    **{f"{start}_strategy": "steps" for start in ("eval", "save", "logging")},
    **{f"{start}_steps": 1 for start in ("eval", "save", "logging", "max")},
    "eval_on_start": False,
}


class ReconciledArguments:
    """What makes a class of arguments take the hyperparameters of its trial; put it before that class.

    ``class Arguments(ReconciledArguments, trl.SFTConfig)``. Under a plain launcher, without a trial, it does nothing.

    Attributes:
        resolved: What was decided; None without a trial.
    """

    resolved: ResolvedConfig | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        named = dict(zip(names, args, strict=False)) | kwargs
        # A parser of command lines hands on all of them; what is at its default was probably not stated.
        is_parsed = len(named) == len(names)
        defaults = defaults_of(type(self))
        self._stated = {
            name: f"{ARGUMENTS}.{name}"
            for name, value in named.items()
            if not (is_parsed and value == defaults.get(name))
        }
        super().__init__(*args, **kwargs)

    def __post_init__(self) -> None:
        trial = trial_here()
        filled = None if trial is None else self._fill(trial)
        super().__post_init__()  # type: ignore[misc]
        if filled is not None:
            self.resolved = filled.resolved
            self._check_agreement(filled)

    def __getstate__(self) -> dict[str, Any]:
        """``training_args.bin`` of a checkpoint: what transformers writes there."""
        return {name: value for name, value in vars(self).items() if name not in ("resolved", "_stated")}

    def _fill(self, trial: TrialHere) -> Filled:
        trial.check_ranks()
        self._take_section(trial.hyperparameters)
        fields = vars(self)
        self._set({"output_dir": placed(fields.get("output_dir"))})
        found, ds = self._deepspeed_json(trial.hyperparameters)
        filled = fill(
            Given(values=fields, stated=self._stated),
            trial.hyperparameters,
            ds,
            slots=num_ranks(),
            accelerator=accelerator_here(use_cpu=bool(fields.get("use_cpu"))),
            machines=num_machines(),
        )
        self._set(filled.fields)
        if found:
            self._set({"deepspeed": filled.ds_config})
        if "seed" not in self._stated:
            self._set({"seed": trial.task.seed})
        self._take_metric(trial)
        if trial.run is not None and trial.run.test:
            self._set(ONE_STEP)
        if not sys.stderr.isatty():  # a bar would fill a log
            transformers.utils.logging.disable_progress_bar()
            if "disable_tqdm" not in self._stated:
                self._set({"disable_tqdm": True})
        if filled.resolved.fit.stop_on_nan and "logging_nan_inf_filter" not in self._stated:
            self._set({"logging_nan_inf_filter": False})  # it would report earlier losses in place of NaN
        return filled

    def _set(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            setattr(self, name, value)

    def _take_section(self, hyperparameters: Document) -> None:
        """Take ``hyperparameters.training_arguments``: arguments by their own names, as Determined's examples have."""
        section = hyperparameters.get((SECTION,))
        problems = []
        for name, value in section.items() if isinstance(section, dict) else ():
            path = (SECTION, name)
            if name not in defaults_of(type(self)):
                problems.append(unknown_key(hyperparameters, path, defaults_of(type(self))))
                continue
            value = _as_kind_of(defaults_of(type(self))[name], value)
            if name in self._stated and getattr(self, name) != value:
                message = f"differs from {self._stated[name]} = {shown(getattr(self, name))}"
                fix = "keep one of them"
                problems.append(hyperparameters.problem(path, message, fix, STATED_TWICE))
                continue
            setattr(self, name, value)
            self._stated[name] = f"{hyperparameters.key(path)} ({hyperparameters.origin(path)})"
        if problems:
            raise ConfigError(problems)

    def _deepspeed_json(self, hyperparameters: Document) -> tuple[bool, Document]:
        """Whether there is a DeepSpeed JSON, and the JSON; an empty one where there is none."""
        own = vars(self).get("deepspeed")
        here = None if not own else _read_deepspeed(own)
        if hyperparameters.get(("deepspeed_config",)) is None:
            return here is not None, here or Document(name="the DeepSpeed JSON", data={})
        where = Where(context_dir=Path.cwd(), accelerator=accelerator_here(use_cpu=False))
        there = where.deepspeed_json(hyperparameters)
        if here is not None and here.data != there.data:
            stated = hyperparameters.origin(("deepspeed_config",))
            message = f"is another configuration than hyperparameters.deepspeed_config ({stated})"
            fix = "keep one of them: leave deepspeed out"
            problem = Problem(key=f"{ARGUMENTS}.deepspeed", message=message, fix=fix, code=STATED_TWICE)
            raise ConfigError(problem)
        return True, there

    def _take_metric(self, trial: TrialHere) -> None:
        """The best checkpoint of transformers is that of the searcher."""
        searcher, fields = trial.searcher, vars(self)
        metric = searcher.get("metric")
        if not metric or str(fields.get("eval_strategy", "no")).rpartition(".")[2].lower() in ("no", ""):
            return
        if "metric_for_best_model" not in self._stated:
            self._set({"metric_for_best_model": str(metric)})
        if "greater_is_better" not in self._stated:
            self._set({"greater_is_better": searcher.get("smaller_is_better") is False})

    def _check_agreement(self, filled: Filled) -> None:
        """Check that transformers goes by what was decided, and name what it would fill otherwise by itself.

        Raises:
            ConfigError: it found a mismatch, which it would report once the model is built.
        """
        given = getattr(self, "hf_deepspeed_config", None)
        if given is None:
            return
        if given.mismatches:
            message = f"transformers finds mismatches: {'; '.join(given.mismatches)}"
            fix = 'write "auto" for these values in the DeepSpeed JSON'
            raise ConfigError(
                Problem(key=f"{ARGUMENTS}.deepspeed", message=message, fix=fix, code=STATED_TWICE)
            )
        if not is_chief():
            return
        for warning in (
            filled.resolved.warnings if script_run() is None else ()
        ):  # else the launcher has shown them
            logger.warning("warning: %s", warning)
        for each in filled_otherwise(self, filled.resolved):
            print(each, flush=True)


class TrainingArguments(ReconciledArguments, transformers.TrainingArguments):
    """``transformers.TrainingArguments``, completed by the hyperparameters of the trial."""


class Seq2SeqTrainingArguments(ReconciledArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments``, completed by the hyperparameters of the trial."""


def filled_otherwise(args: Any, resolved: ResolvedConfig) -> list[Problem]:
    """The ``"auto"`` that transformers alone would fill with another value, from the same arguments.

    Args:
        args: The arguments, as they are set.
        resolved: What was decided.
    """
    from transformers.integrations import deepspeed

    stated = plain_copy(resolved.stated.data)
    kept, alone = deepspeed._hf_deepspeed_config_weak_ref, None
    try:
        alone = deepspeed.HfTrainerDeepSpeedConfig(copy.deepcopy(stated))
        alone.trainer_config_process(args)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = kept
    found = []
    for path in leaf_paths(stated):
        ours, theirs = resolved.ds.get(path), get_path(alone.config, path)
        if get_path(stated, path) == AUTO and theirs != AUTO and ours is not None and ours != theirs:
            message = f"transformers alone would fill it with {shown(theirs)}"
            problem = Problem(
                key=dotted(path), value=ours, origin=resolved.ds.origin(path), message=message, code="hf-auto"
            )
            found.append(problem)
    return found


def defaults_of(kind: type) -> dict[str, Any]:
    """The arguments of a class, with their defaults."""
    parameters = inspect.signature(_plain(kind).__init__).parameters.values()  # type: ignore[misc]
    found = {each.name: each.default for each in parameters if each.name != "self"}
    made = {
        field.name: field.default_factory()
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default_factory is not dataclasses.MISSING
    }
    return found | made


def _plain(kind: type) -> type:
    """The class whose ``__init__`` a dataclass has made."""
    return next(each for each in kind.__mro__ if "__dataclass_fields__" in vars(each))


def _as_kind_of(default: Any, value: Any) -> Any:
    """A YAML value as the type of an argument's default: 1e-5 is a text to YAML."""
    if isinstance(default, float) and isinstance(value, (str, int)) and not isinstance(value, bool):
        return float(value)
    return value


def _read_deepspeed(value: Any) -> Document:
    """``TrainingArguments.deepspeed``: a mapping, a path, or what transformers also takes, a JSON in base64."""
    if isinstance(value, Mapping):
        return Document(name=f"{ARGUMENTS}.deepspeed", data=plain_copy(dict(value)))
    try:
        if not Path(value).exists():
            data = json.loads(base64.urlsafe_b64decode(value).decode())
            return Document(name=f"{ARGUMENTS}.deepspeed", data=data)
    except (OSError, ValueError, binascii.Error):  # not one: the path is reported
        pass
    return read_json(Path(value))
