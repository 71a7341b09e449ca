"""What a changed key means to a run that has begun: refused, in effect from now on, or without effect.

Two configurations are compared: the experiment's, and the mapping that DeepSpeed is given. The tables of
:mod:`determined_ds.config.keys` say what a change of each key means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.config.hyperparameters import PARALLEL_SIZES, TRIAL_SEED
from determined_ds.config.keys.fate import Meaning, row_of
from determined_ds.config.keys.of_json import DEEPSPEED
from determined_ds.config.keys.of_yaml import EXPERIMENT
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.strategy import schedule_of
from determined_ds.documents.differences import Difference, differences, in_words
from determined_ds.documents.document import Document, KeyPath, dotted, get_path, plain_copy
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.experiment.experiment import Experiment, read_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.variables import names_of

# Of one of several engines.
OVERWRITES, CONFIG, ZERO_STAGE = "_overwrite_deepspeed_args", "_deepspeed_config", "_zero_stage"
DEFAULTS: dict[str, Any] = {**dict.fromkeys(PARALLEL_SIZES, 1), "pipe_within_machine": False}
SCHEDULE = ("pipe_schedule", "pipe_chunks")
# How a model is cut into parts: of weights alone nothing else has to be as it was.
PARTS = {("hyperparameters", name) for name in PARALLEL_SIZES}
NVME = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
ON_NVME = "what lies on NVMe cannot be filled from it"
# What a change of the strategy is called on a line for people.
SHORT: dict[KeyPath, str] = {
    ("resources", "slots_per_trial"): "slots",
    ("hyperparameters", "pipe_parallel_size"): "pipe_parallel_size",
    ("hyperparameters", "model_parallel_size"): "model_parallel_size",
    ("hyperparameters", "sequence_parallel_size"): "sequence_parallel_size",
    ("hyperparameters", "expert_parallel_size"): "expert_parallel_size",
    ("hyperparameters", "pipe_within_machine"): "pipe_within_machine",
    **{("hyperparameters", name): name for name in SCHEDULE},
    ("zero_optimization", "stage"): "zero_stage",
}
DIVIDED = (
    "each replica holds all states",
    "the optimizer states are divided among the replicas",
    "optimizer states and gradients are divided among the replicas",
    "optimizer states, gradients and parameters are divided among the replicas",
)
START_ANEW = "start anew in another --run-dir, without --resume"
# Types of DeepSpeed's optimizers with the same states.
ADAMS = {"adam", "adamw"}
RESET = "add --reset-optimizer: the weights stay, and the optimizer's state begins anew"
START_WITHOUT = "start anew, without it"
WHERE = "deepspeed"  # what keys of the second comparison are shown under


def meaning_of(path: KeyPath) -> Meaning | None:
    """What a change of a key of the experiment means; None for an unknown key."""
    if len(path) > 1 and path[0] == "hyperparameters":
        name = str(path[1])
        if name.endswith((CONFIG, ZERO_STAGE)):
            return Meaning.STRATEGY
        if name.endswith(OVERWRITES):
            return meaning_to_deepspeed(path[2:])
    row = row_of(EXPERIMENT, path)
    return row.resume if row else None


def meaning_to_deepspeed(path: KeyPath) -> Meaning:
    """The same for a key of the mapping that DeepSpeed is given; an unknown one counts as layout."""
    row = row_of(DEEPSPEED, path)
    return row.resume if row else Meaning.LAYOUT


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a training, in a form that two of them can be compared in.

    Args:
        experiment: Plain data: the experiment's configuration, of its hyperparameters one point.
        ds_config: Plain data: what DeepSpeed is given; None where that is not known.
    """

    experiment: Mapping[str, Any]
    ds_config: Mapping[str, Any] | None


def settings_of(
    experiment: Experiment, ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> Settings:
    """What an experiment asks for. Of environment variables only the names: values may be secrets.

    Args:
        experiment: The experiment.
        ds_config: What DeepSpeed is given.
        trial_seed: The seed that it was trained with; the experiment's own if None.
    """
    searcher = dict(experiment.config.get("searcher") or {})
    if (
        searcher.get("source_checkpoint_uuid") is not None
    ):  # the path and the uuid of one checkpoint are the same
        searcher["source_checkpoint_uuid"] = True
    data = {
        **experiment.config,
        "searcher": searcher,
        "max_restarts": experiment.max_restarts,
        "environment": {
            **(experiment.config.get("environment") or {}),
            "environment_variables": names_of(experiment.config) or None,
        },
        "entrypoint": list(experiment.entrypoint.words),
        "hyperparameters": {
            **DEFAULTS,
            **experiment.hyperparameters.data,
            **dict(zip(SCHEDULE, schedule_of(experiment.hyperparameters.data), strict=True)),
            TRIAL_SEED: experiment.trial_seed if trial_seed is None else trial_seed,
        },
        "resources": {**(experiment.config.get("resources") or {}), "slots_per_trial": experiment.slots},
        "reproducibility": {"experiment_seed": experiment.seed},
    }
    plain = json.loads(json.dumps(plain_copy(data), default=str))
    # As a checkpoint has it, without secrets.
    ds_config = None if ds_config is None else masked({WHERE: ds_config})[WHERE]
    return Settings(experiment=masked(plain), ds_config=ds_config)


def settings_before(
    config: Mapping[str, Any], ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> Settings | None:
    """What the experiment asked for that a checkpoint was written by; None where it cannot be read.

    Args:
        config: The experiment's configuration, as ``load_data.json`` holds it.
        ds_config: What DeepSpeed was given, from there too.
        trial_seed: The trial's seed then.
    """
    experiment, problems = read_experiment(Document(name="the checkpoint", data=dict(config)))
    return None if problems else settings_of(experiment, ds_config, trial_seed)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What has changed since a checkpoint was written.

    Args:
        effective: Lines for people: what takes effect from here on.
        strategy: Lines for people: how training is carried out from here on.
        idle: Lines for people: what has no effect any more.
        problems: What must be as it was.
    """

    effective: tuple[str, ...] = ()
    strategy: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def changes_since(
    before: Settings,
    experiment: Experiment,
    resolved: ResolvedConfig,
    *,
    written: str,
    warm_start: str | None = None,
    refusal: str | None = None,
    resets_optimizer: bool = False,
) -> Changes:
    """Compare the settings of this run with those that wrote a checkpoint.

    Args:
        before: The settings that wrote the checkpoint.
        experiment: The settings of this run.
        resolved: The same, resolved.
        written: Words for the checkpoint, for messages.
        warm_start: What is taken of the checkpoint by a training that begins anew: of ``all`` its layout has to
            fit, of ``weights`` how the model is cut into parts; None where training continues.
        refusal: Why the checkpoint can only be read by the strategy that wrote it; None where any can.
        resets_optimizer: The optimizer's state begins anew.
    """
    now = settings_of(experiment, resolved.ds_config)
    effective, strategy, idle, problems = [], [], [], []
    refusal = refusal or _not_filled(resolved)
    for difference, meaning, where in _compared(before, now):
        line = f"{where} {difference}".strip()
        if (why := _must_stay(difference, meaning, warm_start, refusal, resets_optimizer)) is not None:
            anew = START_ANEW if warm_start is None else START_WITHOUT
            anew = f"{RESET}, or {anew}" if meaning is Meaning.OPTIMIZER and warm_start is None else anew
            problems.append(_must_be(difference, where, experiment, resolved, written, anew, why))
        elif meaning is Meaning.NOTHING:
            idle.append(line)
        elif meaning is Meaning.STRATEGY and warm_start != "weights":
            strategy.append(_in_short(difference) or line)
        elif meaning is not Meaning.RESOLVED:
            effective.append(line)
    return Changes(
        effective=tuple(effective), strategy=tuple(strategy), idle=tuple(idle), problems=tuple(problems)
    )


def _not_filled(resolved: ResolvedConfig) -> str | None:
    """Why the strategy of this run cannot read what another one wrote; None where it can."""
    devices = [get_path(resolved.ds_config, tuple(key.split("."))) for key in NVME]
    return ON_NVME if "nvme" in devices else None


def _must_stay(
    difference: Difference, meaning: Meaning, warm_start: str | None, refusal: str | None, resets: bool
) -> str | None:
    """Why a key must stay as it was, "" where that needs no reason; None where it may change."""
    if warm_start == "weights":
        return refusal if difference.path in PARTS else None
    if meaning is Meaning.STRATEGY:
        return refusal
    if meaning is Meaning.OPTIMIZER:
        is_kin = {str(difference.was).lower(), str(difference.now).lower()} <= ADAMS
        return None if resets or is_kin else "its optimizer state is of that kind"
    return "" if meaning is Meaning.LAYOUT or (meaning is Meaning.COURSE and warm_start is None) else None


def _in_short(difference: Difference) -> str:
    """A change of the strategy under the name that it has everywhere; "" where it has none."""
    if difference.path == ("entrypoint",):
        trials = [str(word).partition(":")[2] for [word] in (difference.was, difference.now)]
        return f"trial {' -> '.join(trials)}"
    name = SHORT.get(difference.path, "")
    was, now = (0 if value is NOT_GIVEN else value for value in (difference.was, difference.now))
    if name == "zero_stage" and now in range(len(DIVIDED)):
        return f"{name} {was} -> {now}: {DIVIDED[now]}"
    return f"{name} {was} -> {now}" if name else ""


def _compared(before: Settings, now: Settings) -> Iterator[tuple[Difference, Meaning, str]]:
    found = list(differences(before.experiment, now.experiment))
    follows = any(difference.path[0] == "reproducibility" for difference in found)
    for difference in found:
        if follows and difference.path == ("hyperparameters", TRIAL_SEED):
            continue
        form = difference.path == ("entrypoint",) and _of_one_module(difference.was, difference.now)
        yield difference, Meaning.STRATEGY if form else meaning_of(difference.path) or Meaning.COURSE, ""
    if before.ds_config is not None:
        for difference in differences(before.ds_config, now.ds_config):
            yield difference, meaning_to_deepspeed(difference.path), WHERE


def _of_one_module(was: Any, now: Any) -> bool:
    """Whether two entrypoints are trials of one module: forms of one model, such as whole and as a pipeline.

    Whether each then finds its tensors by name in the checkpoints of the other, its ranks see before they load any.
    """
    words = [entrypoint for entrypoint in (was, now) if isinstance(entrypoint, list) and len(entrypoint) == 1]
    modules = {str(word).partition(":")[0] for [word] in words if ":" in str(word)}
    return len(words) == 2 and len(modules) == 1


def _must_be(
    difference: Difference,
    where: str,
    experiment: Experiment,
    resolved: ResolvedConfig,
    written: str,
    anew: str,
    why: str,
) -> Problem:
    path = difference.path
    origin = (
        resolved.origins.get(dotted(path), "")
        if where
        else experiment.hyperparameters.origin(path[1:])
        if path[0] == "hyperparameters"
        else experiment.document.origin(path)
    )
    return Problem(
        key=f"{where} {difference.key}".strip(),
        value=difference.now,
        origin=origin,
        message=f"was {in_words(difference.was)} when {written} was written, and must stay so{why and f': {why}'}",
        fix=f"go back to {in_words(difference.was)}, or {anew}",
        code="resume-changed",
    )
