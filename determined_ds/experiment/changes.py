"""What a changed key means to a run that has begun: refused, in effect from now on, or without effect.

Two configurations are compared: the experiment's, and the mapping that DeepSpeed is given. The tables of
:mod:`determined_ds.config.keys` say what a change of each key means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from determined_ds.config.keys import DEEPSPEED, EXPERIMENT, Meaning, meaning_of
from determined_ds.config.params import PARALLEL_SIZES, TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import schedule_of
from determined_ds.documents.document import Difference, Document, KeyPath, differences, get_path, in_words
from determined_ds.documents.text import as_plain
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.experiment.experiment import Experiment, read_experiment
from determined_ds.experiment.secrets import masked
from determined_ds.experiment.variables import names_of

SCHEDULE = ("pipe_schedule", "pipe_chunks")
# Changes of the strategy that have a name on a line for people.
NAMED = (*PARALLEL_SIZES, "expert_parallel_size", "pipe_within_machine", *SCHEDULE)
SHORT: dict[KeyPath, str] = {
    **{("hyperparameters", name): name for name in NAMED},
    ("resources", "slots_per_trial"): "slots",
    ("zero_optimization", "stage"): "zero_stage",
}
NVME = [("zero_optimization", f"offload_{what}", "device") for what in ("optimizer", "param")]
ADAMS = {"adam", "adamw"}  # types of DeepSpeed's optimizers with the same states
WHERE = "deepspeed"  # what keys of the second comparison are shown under


class Settings(NamedTuple):
    """What decides a training, as plain data without secrets, so that two of them can be compared."""

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
        "environment": (config.get("environment") or {})
        | {"environment_variables": names_of(config) or None},
        "entrypoint": list(experiment.entrypoint.words),
        "hyperparameters": {
            **dict.fromkeys(PARALLEL_SIZES, 1),
            "pipe_within_machine": False,
            **hyperparameters,
            **dict(zip(SCHEDULE, schedule_of(hyperparameters), strict=True)),
            TRIAL_SEED: experiment.trial_seed if trial_seed is None else trial_seed,
        },
        "resources": {**(config.get("resources") or {}), "slots_per_trial": experiment.slots},
        "reproducibility": {"experiment_seed": experiment.space.seed},
    }
    plain = json.loads(json.dumps(as_plain(data), default=str))
    return Settings(masked(plain), ds_config and masked({WHERE: ds_config})[WHERE])


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
    if refusal is None and "nvme" in (get_path(resolved.ds.data, path) for path in NVME):
        refusal = "what lies on NVMe cannot be filled from it"
    anew = "start anew, without it" if warm_start else "start anew in another --run-dir, without --resume"
    for change, meaning, where in _compared(before, settings_of(experiment, resolved.ds_config)):
        # Why it must stay as it was, "" where that needs no reason; None where it may change.
        if warm_start == "weights":
            why = refusal if change.path in {("hyperparameters", name) for name in PARALLEL_SIZES} else None
        else:
            is_kin = resets_optimizer or {str(change.was).lower(), str(change.now).lower()} <= ADAMS
            why = {
                Meaning.STRATEGY: refusal,
                Meaning.OPTIMIZER: None if is_kin else "its optimizer state is of that kind",
                Meaning.LAYOUT: "",
                Meaning.COURSE: None if warm_start else "",
            }.get(meaning)
        line = f"{where} {change}".strip()
        if why is not None:
            fix = f"go back to {in_words(change.was)}, or {anew}"
            if meaning is Meaning.OPTIMIZER and warm_start is None:
                reset = "add --reset-optimizer: the weights stay, and the optimizer's state begins anew"
                fix = f"go back to {in_words(change.was)}, or {reset}, or {anew}"
            key, document = f"{where} {change.key}".strip(), resolved.ds if where else experiment.document
            message = (
                f"was {in_words(change.was)} when {written} was written, and must stay so{why and f': {why}'}"
            )
            problem = document.problem(change.path, message, fix, "resume-changed", value=change.now)
            problems.append(replace(problem, key=key))
        elif meaning is Meaning.NOTHING:
            idle.append(line)
        elif meaning is Meaning.STRATEGY and warm_start != "weights":
            strategy.append(_in_short(change) or line)
        elif meaning is not Meaning.RESOLVED:
            effective.append(line)
    return Changes(
        effective=tuple(effective), strategy=tuple(strategy), idle=tuple(idle), problems=tuple(problems)
    )


def _compared(before: Settings, now: Settings) -> Iterator[tuple[Difference, Meaning, str]]:
    """Each difference, what it means, and in which of the two configurations it is."""
    found = list(differences(before.experiment, now.experiment))
    reseeded = any(change.path[0] == "reproducibility" for change in found)
    for change in found:
        path = change.path
        name = str(path[1]) if path[0] == "hyperparameters" and len(path) > 1 else ""
        if name == TRIAL_SEED and reseeded:
            continue  # it follows
        meaning = meaning_of(EXPERIMENT, path, Meaning.COURSE)
        if name.endswith(("_deepspeed_config", "_zero_stage")):  # of one of several engines
            meaning = Meaning.STRATEGY
        elif name.endswith("_overwrite_deepspeed_args"):
            meaning = meaning_of(DEEPSPEED, path[2:], Meaning.LAYOUT)
        elif path == ("entrypoint",):
            # Two trials of one module are forms of one model, such as whole and as a pipeline. Whether each then finds
            # its tensors by name in the checkpoints of the other, its ranks see before they load any.
            was, now_in = (_trial(words).partition(":")[0] for words in (change.was, change.now))
            meaning = Meaning.STRATEGY if was and was == now_in else meaning
        yield change, meaning, ""
    if before.ds_config is not None:
        for change in differences(before.ds_config, now.ds_config):
            yield change, meaning_of(DEEPSPEED, change.path, Meaning.LAYOUT), WHERE


def _trial(words: Any) -> str:
    """``module:Class``, where the words of an entrypoint name a trial; else ""."""
    return str(words[0]) if isinstance(words, list) and len(words) == 1 and ":" in str(words[0]) else ""


def _in_short(change: Difference) -> str:
    """A change of the strategy under the name that it has everywhere; "" where it has none."""
    name = SHORT.get(change.path, "")
    was, now = (0 if value is NOT_GIVEN else value for value in (change.was, change.now))
    if change.path == ("entrypoint",):
        name, was, now = "trial", _trial(was).partition(":")[2], _trial(now).partition(":")[2]
    return f"{name} {was} -> {now}" if name else ""
