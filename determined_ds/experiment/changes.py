"""What a changed key means to a run that has begun: refused, in effect from now on, or without effect.

What decides a training is one mapping: the experiment's configuration, and below ``deepspeed`` what DeepSpeed is given.
Two are compared, and the tables of :mod:`determined_ds.config.keys` say what a change of each key means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from determined_ds.config.keys import DEEPSPEED, EXPERIMENT, Meaning, meaning_of
from determined_ds.config.params import PARALLEL_SIZES, TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import schedule_of
from determined_ds.documents.document import Difference, Document, differences, get_path, in_words
from determined_ds.documents.text import as_plain
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import Experiment, read_experiment, variables_of
from determined_ds.experiment.secrets import masked

NVME = [("zero_optimization", f"offload_{what}", "device") for what in ("optimizer", "param")]
ADAMS = {"adam", "adamw"}  # types of DeepSpeed's optimizers with the same states
OF_DEEPSPEED = "deepspeed"


def settings_of(
    experiment: Experiment, ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> dict[str, Any]:
    """What decides a training, as plain data without secrets, so that two of them can be compared.

    Of environment variables only the names: values may be secrets.

    Args:
        experiment: It; of its hyperparameters one point.
        ds_config: What DeepSpeed is given; None where that is not known.
        trial_seed: The experiment's own if None.
    """
    config, hyperparameters = experiment.config, experiment.hyperparameters.data
    searcher = dict(config.get("searcher") or {})
    if searcher.get("source_checkpoint_uuid") is not None:
        searcher["source_checkpoint_uuid"] = True  # the path and the uuid of one checkpoint are the same
    schedule, chunks = schedule_of(hyperparameters)
    variables = {f"{device} {name}".strip() for _, device, name, _ in variables_of(experiment.document)}
    data = {
        **config,
        "searcher": searcher,
        "max_restarts": experiment.max_restarts,
        "environment": (config.get("environment") or {})
        | {"environment_variables": sorted(variables) or None},
        "entrypoint": list(experiment.entrypoint.words),
        "hyperparameters": {
            **dict.fromkeys(PARALLEL_SIZES, 1),
            "pipe_within_machine": False,
            **hyperparameters,
            "pipe_schedule": schedule,
            "pipe_chunks": chunks,
            TRIAL_SEED: experiment.trial_seed if trial_seed is None else trial_seed,
        },
        "resources": {**(config.get("resources") or {}), "slots_per_trial": experiment.slots},
        "reproducibility": {"experiment_seed": experiment.space.seed},
        OF_DEEPSPEED: ds_config,
    }
    return masked(json.loads(json.dumps(as_plain(data), default=str)))


def settings_before(
    config: Mapping[str, Any], ds_config: Mapping[str, Any] | None, trial_seed: int | None = None
) -> dict[str, Any] | None:
    """What the experiment asked for, as a checkpoint's ``load_data.json`` holds it; None where it cannot be read."""
    experiment, problems = read_experiment(Document(name="the checkpoint", data=dict(config)))
    return None if problems else settings_of(experiment, ds_config, trial_seed)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What has changed since a checkpoint was written, in lines for people; and what must be as it was."""

    effective: list[str] = field(default_factory=list)  # from here on
    strategy: list[str] = field(default_factory=list)  # how training is carried out from here on
    idle: list[str] = field(default_factory=list)  # without effect
    problems: list[Problem] = field(default_factory=list)


def changes_since(
    before: Mapping[str, Any],
    experiment: Experiment,
    resolved: ResolvedConfig,
    *,
    written: str,
    warm_start: str | None = None,
    refusal: str | None = None,
) -> Changes:
    """Compare the settings of this run with those that wrote a checkpoint.

    Args:
        before: The settings that wrote the checkpoint, of :func:`settings_before`.
        experiment: The settings of this run.
        resolved: The same, resolved.
        written: Words for the checkpoint, for messages.
        warm_start: What is taken of the checkpoint by a training that begins anew: of ``all`` its layout has to
            fit, of ``weights`` how the model is cut into parts; None where training continues.
        refusal: Why the checkpoint can only be read by the strategy that wrote it; None where any can.
    """
    found = Changes()
    if refusal is None and "nvme" in (get_path(resolved.ds.data, path) for path in NVME):
        refusal = "what lies on NVMe cannot be filled from it"
    anew = "start anew, without it" if warm_start else "start anew in another --run-dir, without --resume"
    now = settings_of(experiment, None if before[OF_DEEPSPEED] is None else resolved.ds_config)
    is_reseeded = before["reproducibility"] != now["reproducibility"]
    for change in sorted(differences(before, now), key=lambda change: change.path[0] == OF_DEEPSPEED):
        if is_reseeded and change.path == ("hyperparameters", TRIAL_SEED):
            continue  # it follows
        meaning = _meaning(change)
        # Why it must stay as it was, "" where that needs no reason; None where it may change.
        if warm_start == "weights":
            why = refusal if change.path in {("hyperparameters", name) for name in PARALLEL_SIZES} else None
        else:
            is_kin = {str(change.was).lower(), str(change.now).lower()} <= ADAMS
            why = {
                Meaning.STRATEGY: refusal,
                Meaning.OPTIMIZER: None if is_kin else "its optimizer state is of that kind",
                Meaning.LAYOUT: "",
                Meaning.COURSE: None if warm_start else "",
            }.get(meaning)
        if why is not None:
            was = in_words(change.was)
            message = f"was {was} when {written} was written, and must stay so{why and f': {why}'}"
            weights = ""
            if meaning is Meaning.OPTIMIZER and warm_start is None:
                weights = "start from its weights (searcher.source_checkpoint_uuid), or "
            document, path = experiment.document, change.path
            if path[0] == OF_DEEPSPEED:
                document, path = resolved.ds, path[1:]
            fix = f"go back to {was}, or {weights}{anew}"
            problem = document.problem(path, message, fix, "resume-changed", value=change.now)
            found.problems.append(replace(problem, key=change.key))
        elif meaning is Meaning.NOTHING:
            found.idle.append(str(change))
        elif meaning is Meaning.STRATEGY and warm_start != "weights":
            found.strategy.append(str(change))
        elif meaning is not Meaning.RESOLVED:
            found.effective.append(str(change))
    return found


def _meaning(change: Difference) -> Meaning:
    """What a change means to a run that has begun."""
    section, *below = change.path
    name = str(below[0]) if section == "hyperparameters" and below else ""
    if section == OF_DEEPSPEED:
        return meaning_of(DEEPSPEED, tuple(below), Meaning.LAYOUT)
    if name.endswith("_overwrite_deepspeed_args"):  # of one of several engines
        return meaning_of(DEEPSPEED, tuple(below[1:]), Meaning.LAYOUT)
    if name.endswith(("_deepspeed_config", "_zero_stage")):
        return Meaning.STRATEGY
    if section == "entrypoint" and len(change.was) == len(change.now) == 1 and ":" in change.now[0]:
        # Two trials of one module are forms of one model, such as whole and as a pipeline. Whether each then finds
        # its tensors by name in the checkpoints of the other, its ranks see before they load any.
        was, now = (words[0].partition(":")[0] for words in (change.was, change.now))
        if was == now:
            return Meaning.STRATEGY
    return meaning_of(EXPERIMENT, change.path, Meaning.COURSE)
