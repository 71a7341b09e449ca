"""A trained model from a checkpoint, without an engine, a cluster or the slots that trained it."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from determined_ds.config.layout import BATCH_KEYS, assumed_cuda
from determined_ds.config.params import PARALLEL_SIZES, SIZES, TRIAL_SEED
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import restored
from determined_ds.experiment.source import source_of
from determined_ds.protocol.checkpoint_files import damage_of, is_sealed, unverified
from determined_ds.runtime.checkpoints.code_copy import CODE, differing_library
from determined_ds.runtime.checkpoints.contents import only_data, runs_code
from determined_ds.runtime.checkpoints.weights import averaged_weights, weights_in
from determined_ds.runtime.shapes.bare_trial import (
    bare_trial,
    chain_of,
    entrypoint_problem,
    forget_namesake,
    inside,
    trial_class,
)

logger = logging.getLogger("determined_ds")
CONTEXT_DIR, CHECKPOINT = "context_dir", "checkpoint"
# Packages that may be imported from where they are installed, beside this library.
TRUSTED = ("determined_ds", "model_defs")


def load_state_dict_from_checkpoint_path(
    path: str | Path, *, engine: int = 0, verify: bool = True, average: str | None = None
) -> dict[str, torch.Tensor]:
    """The whole weights of a checkpoint, whatever ZeRO stage and however many slots wrote it.

    Args:
        path: A checkpoint's folder: of ``det checkpoint download``, or ``checkpoints/<uuid>`` of a run directory.
        engine: Which engine's, where a trial has several, counted from 0.
        verify: Whether to compare every file with the checkpoint's manifest first.
        average: The name of an ``EMA`` in ``build_callbacks``, to have its average of the trained parameters.

    Returns:
        Name of a parameter -> float32 tensor on the CPU. Of a pipeline, names begin with the index of the layer:
        ``3.weight``. Weights that were trained in 16 bits come from the optimizer's fp32 copy where ZeRO split it.

    Raises:
        CheckpointError: it is damaged, or holds no such engine or average, or something that could run code.
    """
    path = Path(path)
    damage = damage_of(path) if verify else None
    if damage:
        raise CheckpointError(f"checkpoint {path} is damaged: {damage}")
    if verify and not is_sealed(path):
        logger.warning("warning: %s", unverified(str(path)))
    folder = path / f"model{engine}"
    if not folder.is_dir():
        there = sorted(found.name for found in path.glob("model*") if found.is_dir())
        raise CheckpointError(
            f"checkpoint {path} has no engine {engine}; it has: {', '.join(there) or 'none'}"
        )
    try:
        with only_data():
            weights = {name: tensor.contiguous().float() for name, tensor in weights_in(path, engine).items()}
            return weights if average is None else averaged_weights(path, engine, average, weights)
    except pickle.UnpicklingError as error:
        raise runs_code(str(path), error) from error


def load_model_from_checkpoint_path(
    path: str | Path,
    *,
    context_dir: str | Path = ".",
    trial: Any = None,
    code: str = CONTEXT_DIR,
    average: str | None = None,
) -> torch.nn.Module:
    """The model of a checkpoint, built by its trial, with the trained weights.

    A checkpoint names its trial, and importing that runs its code: only what lies in ``context_dir``, in this library
    or in its ``model_defs`` is imported.

    Determined's ``load_trial_from_checkpoint_path`` (0.38.1) takes trials of the class PyTorchTrial only.

    Args:
        path: A checkpoint's folder, see :func:`load_state_dict_from_checkpoint_path`.
        context_dir: The folder with the trial's code.
        trial: The trial's class; the one that the checkpoint names, if None. If given, nothing is imported.
        code: Where the trial's code comes from: ``context_dir``, or ``checkpoint`` for its ``code/``, which
            checkpoints from a cluster have. That runs code of the checkpoint: use it only if you trust its author.
            This library itself is not replaced.
        average: See :func:`load_state_dict_from_checkpoint_path`.

    Returns:
        The model on the CPU in float32, in evaluation mode; of a pipeline, its layers one after the other.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its trial is not in ``context_dir``, cannot be imported, or builds its model together with an
            engine; or ``code`` is neither of the two.
    """
    path, context_dir = Path(path).resolve(), Path(context_dir)
    if code not in (CONTEXT_DIR, CHECKPOINT):
        message, fix = "is not a valid place of code", f"use {CONTEXT_DIR} or {CHECKPOINT}"
        raise ConfigError(Problem(key="code", value=code, message=message, fix=fix, code="out-of-range"))
    weights = load_state_dict_from_checkpoint_path(path, average=average)
    experiment = _experiment_of(path)
    if code == CHECKPOINT:
        context_dir = _own_code(path, experiment)
    with inside(context_dir):
        if trial is None:
            _check_trusted(experiment)
            trial = trial_class(experiment)
        model, weights = _built(trial, experiment, weights)
    if reason := _misfit(model, weights):
        raise CheckpointError(f"checkpoint {path} is of another model than {trial.__name__} builds: {reason}")
    return model.eval()


def trial_in(path: Path) -> Any:
    """The trial that a checkpoint names, prepared and without an engine; the current folder is its context directory.

    Args:
        path: The checkpoint's folder.

    Raises:
        ConfigError: it lies outside the current folder, or cannot be imported.
    """
    experiment = _experiment_of(path)
    _check_trusted(experiment)
    return _prepared(trial_class(experiment), experiment)


def own_code_of(path: Path) -> Path:
    """The folder with a checkpoint's own copy of the code.

    Raises:
        ConfigError: it has none.
    """
    return _own_code(path, _experiment_of(path))


def _prepared(kind: Any, experiment: Experiment) -> Any:
    trial = bare_trial(kind, experiment, _resolved(experiment), "cpu")
    trial.prepare()
    return trial


def _built(
    kind: Any, experiment: Experiment, weights: dict[str, torch.Tensor]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model, and the weights by its names."""
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    trial = _prepared(kind, experiment)
    if not isinstance(trial, PipelineTrial):
        return returned.model(trial, trial.build_model()), weights
    chain = chain_of(returned.layers(trial, trial.build_layers(), 1))
    return chain, {_in_chain(name): tensor for name, tensor in weights.items()}


def _misfit(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> str:
    """Load weights into a model. Returns why they do not fit, or ""."""
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of another shape
        return str(error)
    named = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(named[name]) for name in weights if name in named}  # a tied weight is written once
    if lacking := [name for name in missing if id(named.get(name)) not in filled]:
        return f"lacks {', '.join(lacking)}"
    return f"also has {', '.join(unexpected)}" if unexpected else ""


def _in_chain(name: str) -> str:
    """``3.weight`` -> ``3.inner.weight``."""
    index, _, rest = name.partition(".")
    return f"{index}.inner.{rest}"


def _own_code(path: Path, experiment: Experiment) -> Path:
    """The code in a checkpoint, which has just been compared with its manifest."""
    own = path / CODE
    module = experiment.trial.partition(":")[0]
    if source_of(module, own) is None:
        missing = (
            f"holds no {module}" if own.is_dir() else "is missing: only checkpoints from a cluster have it"
        )
        fix = f"give the context_dir that holds {module}"
        raise ConfigError(Problem(key="code", value=str(own), message=missing, fix=fix, code="no-code"))
    if differing := differing_library(own):
        logger.warning(
            "warning: determined_ds in %s differs from the checkpoint's in %s modules, e.g. %s; to use the "
            "checkpoint's, start Python with PYTHONPATH=%s",
            *(Path(__file__).resolve().parents[1], len(differing), differing[0], own),
        )
    return own


def _experiment_of(path: Path) -> Experiment:
    try:
        found = json.loads((path / "load_data.json").read_text())
        seed = {TRIAL_SEED: found[TRIAL_SEED]} if TRIAL_SEED in found else {}
        hparams = _constants({**seed, **found["hparams"]})
        config = {**(found["experiment_config"] or {}), "hyperparameters": hparams}
        if not found["trial_cls_spec"]:
            raise CheckpointError(
                f"checkpoint {path} was written by a script, which alone can build its model\n"
                "  fix: build it, and model.load_state_dict(load_state_dict_from_checkpoint_path(path))"
            )
        config["entrypoint"] = f"python3 -m determined_ds.train {found['trial_cls_spec']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not say what trial wrote it: {error}") from None
    kept = ("name", "entrypoint", "hyperparameters", "data", "reproducibility")
    data = {key: config[key] for key in kept if key in config}
    return parse_experiment(restored(Document(name=str(path / "load_data.json"), data=data), os.environ))


def _check_trusted(experiment: Experiment) -> None:
    """Refuse a trial whose module would not be imported from the context directory, which is the current folder.

    To find the first part of a dotted name nothing is run, and all others are below it.
    """
    context_dir = Path.cwd().resolve()
    module = experiment.trial.partition(":")[0]
    package = module.split(".")[0]
    forget_namesake(package)
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module that was made by hand
        spec = None
    if spec is None:
        return  # not found: the import will report it
    first = Path(next(iter(spec.submodule_search_locations or ()), None) or spec.origin or "").resolve()
    is_sole = spec.has_location  # else it may lie in several places, and this module in another
    if first.is_relative_to(context_dir) and (is_sole or source_of(module, context_dir) is not None):
        return
    if package in TRUSTED and first.parent == Path(__file__).resolve().parents[2]:
        return
    message = (
        f"the checkpoint names a trial outside {context_dir}, in {first}; importing it would run its code"
    )
    fix = "give the context_dir that holds it, or the class itself: trial=MyTrial"
    raise ConfigError(entrypoint_problem(experiment, message, fix, "untrusted"))


def _constants(hparams: dict[str, Any]) -> dict[str, Any]:
    """As constants, so nothing in them is taken for a range to search."""
    return {key: {"type": "const", "val": value} for key, value in hparams.items()}


def _resolved(experiment: Experiment) -> Any:
    """The sizes that it was trained with; the rest of a configuration only concerns the engine."""
    given = experiment.hyperparameters.data
    sizes = {key: given[key] for key in SIZES if isinstance(given.get(key), int)}
    batch = {key: given[key] for key in BATCH_KEYS if isinstance(given.get(key), int)}
    slots = math.prod(sizes.get(name, 1) for name in ("data_parallel_world_size", *PARALLEL_SIZES))
    document = Document(name="load_data.json", data=sizes, prefix="hyperparameters")
    ds = Document(name="load_data.json", data=batch)
    return reconcile(document, ds, slots=slots, accelerator=assumed_cuda(slots))
