"""What a changed key means to a run that has begun: refused, in effect from now on, or without effect.

Two configurations are compared: the experiment's, and the mapping that DeepSpeed is given. The tables of
:mod:`determined_ds.config.keys` say what a change of each key means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.config.keys import DEEPSPEED, EXPERIMENT, Meaning, row_of
from determined_ds.config.params import PARALLEL_SIZES, TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import schedule_of
from determined_ds.documents.document import (
    Difference,
    Document,
    KeyPath,
    differences,
    dotted,
    get_path,
    in_words,
)
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.experiment.experiment import Experiment, read_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.variables import names_of

SCHEDULE = ("pipe_schedule", "pipe_chunks")
# Changes of the strategy that have a name on a line for people.
SHORT: dict[KeyPath, str] = {
    ("resources", "slots_per_trial"): "slots",
    **{
        ("hyperparameters", name): name
        for name in (*PARALLEL_SIZES, "expert_parallel_size", "pipe_within_machine", *SCHEDULE)
    },
    ("zero_optimization", "stage"): "zero_stage",
}
NVME = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
ADAMS = {"adam", "adamw"}  # types of DeepSpeed's optimizers with the same states
WHERE = "deepspeed"  # what keys of the second comparison are shown under


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a training, as plain data, so that two of them can be compared."""

    experiment: Mapping[str, Any]  # of its hyperparameters one point
    ds_config: Mapping[str, Any] | None  # what DeepSpeed is given; None where that is not known


def settings_of(
    experiment: Experiment, ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> Settings:
    """What an experiment asks for, ``trial_seed`` being its own if None.

    Of environment variables only the names: values may be secrets.
    """
    config, hyperparameters = experiment.config, experiment.hyperparameters.data
    searcher = dict(config.get("searcher") or {})
    if searcher.get("source_checkpoint_uuid") is not None:
        searcher["source_checkpoint_uuid"] = True  # the path and the uuid of one checkpoint are the same
    data = {
        **config,
        "searcher": searcher,
        "max_restarts": experiment.max_restarts,
        "environment": {
            **(config.get("environment") or {}),
            "environment_variables": names_of(config) or None,
        },
        "entrypoint": list(experiment.entrypoint.words),
        "hyperparameters": {
            **dict.fromkeys(PARALLEL_SIZES, 1),
            "pipe_within_machine": False,
            **hyperparameters,
            **dict(zip(SCHEDULE, schedule_of(hyperparameters), strict=True)),
            TRIAL_SEED: experiment.trial_seed if trial_seed is None else trial_seed,
        },
        "resources": {**(config.get("resources") or {}), "slots_per_trial": experiment.slots},
        "reproducibility": {"experiment_seed": experiment.seed},
    }
    plain = json.loads(json.dumps(as_plain(data), default=str))
    # Without secrets, as a checkpoint has it.
    ds_config = None if ds_config is None else masked({WHERE: ds_config})[WHERE]
    return Settings(experiment=masked(plain), ds_config=ds_config)


def settings_before(
    config: Mapping[str, Any], ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> Settings | None:
    """What the experiment asked for, as a checkpoint's ``load_data.json`` holds it; None where it cannot be read."""
    experiment, problems = read_experiment(Document(name="the checkpoint", data=dict(config)))
    return None if problems else settings_of(experiment, ds_config, trial_seed)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What has changed since a checkpoint was written, in lines for people; and what must be as it was."""

    effective: tuple[str, ...] = ()  # from here on
    strategy: tuple[str, ...] = ()  # how training is carried out from here on
    idle: tuple[str, ...] = ()  # without effect
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
    effective, strategy, idle, problems = [], [], [], []
    if refusal is None and any(get_path(resolved.ds_config, tuple(key.split("."))) == "nvme" for key in NVME):
        refusal = "what lies on NVMe cannot be filled from it"
    for difference, meaning, where in _compared(before, settings_of(experiment, resolved.ds_config)):
        path, was = difference.path, difference.was
        why = None  # it must stay as it was, "" where that needs no reason
        if warm_start == "weights":
            is_cut = path[:1] == ("hyperparameters",) and path[1:] in {(name,) for name in PARALLEL_SIZES}
            why = refusal if is_cut else None
        elif meaning is Meaning.STRATEGY:
            why = refusal
        elif meaning is Meaning.OPTIMIZER:
            is_kin = {str(was).lower(), str(difference.now).lower()} <= ADAMS
            why = None if resets_optimizer or is_kin else "its optimizer state is of that kind"
        elif meaning is Meaning.LAYOUT or (meaning is Meaning.COURSE and warm_start is None):
            why = ""
        if why is not None:
            anew = (
                "start anew, without it"
                if warm_start
                else "start anew in another --run-dir, without --resume"
            )
            if meaning is Meaning.OPTIMIZER and warm_start is None:
                anew = f"add --reset-optimizer: the weights stay, and the optimizer's state begins anew, or {anew}"
            if where:
                origin = resolved.origins.get(dotted(path), "")
            elif path[0] == "hyperparameters":
                origin = experiment.hyperparameters.origin(path[1:])
            else:
                origin = experiment.document.origin(path)
            problem = Problem(
                key=f"{where} {difference.key}".strip(),
                value=difference.now,
                origin=origin,
                message=f"was {in_words(was)} when {written} was written, and must stay so{why and f': {why}'}",
                fix=f"go back to {in_words(was)}, or {anew}",
                code="resume-changed",
            )
            problems.append(problem)
            continue
        line = f"{where} {difference}".strip()
        if meaning is Meaning.NOTHING:
            idle.append(line)
        elif meaning is Meaning.STRATEGY and warm_start != "weights":
            strategy.append(_in_short(difference) or line)
        elif meaning is not Meaning.RESOLVED:
            effective.append(line)
    return Changes(
        effective=tuple(effective), strategy=tuple(strategy), idle=tuple(idle), problems=tuple(problems)
    )


def _compared(before: Settings, now: Settings) -> Iterator[tuple[Difference, Meaning, str]]:
    """Each difference, what it means, and in which of the two configurations it is."""
    found = list(differences(before.experiment, now.experiment))
    reseeded = any(difference.path[0] == "reproducibility" for difference in found)
    for difference in found:
        path = difference.path
        if reseeded and path == ("hyperparameters", TRIAL_SEED):
            continue  # it follows
        row = row_of(EXPERIMENT, path)
        meaning = row.resume if row else Meaning.COURSE
        name = str(path[1]) if len(path) > 1 and path[0] == "hyperparameters" else ""
        if name.endswith(("_deepspeed_config", "_zero_stage")):  # of one of several engines
            meaning = Meaning.STRATEGY
        elif name.endswith("_overwrite_deepspeed_args"):
            row = row_of(DEEPSPEED, path[2:])
            meaning = row.resume if row else Meaning.LAYOUT
        elif path == ("entrypoint",) and _of_one_module(difference.was, difference.now):
            meaning = Meaning.STRATEGY
        yield difference, meaning, ""
    if before.ds_config is not None:
        for difference in differences(before.ds_config, now.ds_config):
            row = row_of(DEEPSPEED, difference.path)
            yield difference, row.resume if row else Meaning.LAYOUT, WHERE


def _of_one_module(was: Any, now: Any) -> bool:
    """Whether two entrypoints are trials of one module: forms of one model, such as whole and as a pipeline.

    Whether each then finds its tensors by name in the checkpoints of the other, its ranks see before they load any.
    """
    words = [str(each[0]) for each in (was, now) if isinstance(each, list) and len(each) == 1]
    return len({word.partition(":")[0] for word in words if ":" in word}) == 1 and len(words) == 2


def _in_short(difference: Difference) -> str:
    """A change of the strategy under the name that it has everywhere; "" where it has none."""
    if difference.path == ("entrypoint",):
        trials = [str(word).partition(":")[2] for [word] in (difference.was, difference.now)]
        return f"trial {' -> '.join(trials)}"
    name = SHORT.get(difference.path, "")
    was, now = (0 if value is NOT_GIVEN else value for value in (difference.was, difference.now))
    return f"{name} {was} -> {now}" if name else ""
