"""A trained model out of a checkpoint, without an engine, a cluster or the slots that trained it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from determined_ds.config.accelerator import assumed_cuda
from determined_ds.config.batch import BATCH_KEYS
from determined_ds.config.hyperparameters import SIZES, TRIAL_SEED
from determined_ds.config.reconcile import reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import restored
from determined_ds.experiment.trial_file import source_of
from determined_ds.protocol.checkpoint_files import damage_of, is_sealed, unverified
from determined_ds.runtime.checkpoints.code_copy import CODE, differing_library
from determined_ds.runtime.checkpoints.contents import only_data
from determined_ds.runtime.checkpoints.weights import weights_in
from determined_ds.runtime.shapes.bare_trial import bare_trial, chain_of, forget_namesake, inside, trial_class

logger = logging.getLogger("determined_ds")
CONTEXT_DIR, CHECKPOINT = "context_dir", "checkpoint"
# Packages that may be imported from where they are installed, beside this library.
TRUSTED = ("determined_ds", "model_defs")


def load_state_dict_from_checkpoint_path(
    path: str | Path, *, engine: int = 0, verify: bool = True
) -> dict[str, torch.Tensor]:
    """The whole weights of a checkpoint, whatever ZeRO stage and however many slots wrote it.

    Args:
        path: A checkpoint's folder: of ``det checkpoint download``, or ``checkpoints/<uuid>`` of a run directory.
        engine: Which engine's, where a trial has several, counted from 0.
        verify: Whether to compare every file with the checkpoint's manifest first.

    Returns:
        Name of a parameter -> float32 tensor on the CPU. Of a pipeline, names begin with the index of the layer:
        ``3.weight``. Weights that were trained in 16 bits come from the optimizer's fp32 copy where ZeRO split it.

    Raises:
        CheckpointError: it is damaged, or holds no such engine, or something that could run code.
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
            return {name: tensor.contiguous().float() for name, tensor in weights_in(path, engine).items()}
    except pickle.UnpicklingError as error:
        message = f"checkpoint {path} holds objects that could run code, and is not loaded: {error}"
        raise CheckpointError(message) from error


def load_model_from_checkpoint_path(
    path: str | Path, *, context_dir: str | Path = ".", trial: Any = None, code: str = CONTEXT_DIR
) -> torch.nn.Module:
    """The model of a checkpoint, built by its trial and filled with what was trained.

    A checkpoint names its trial, and to import that is to run its code: only what lies in ``context_dir`` is
    imported, or in this library and its ``model_defs``.

    Determined's ``load_trial_from_checkpoint_path`` (0.38.1) takes trials of the class PyTorchTrial only.

    Args:
        path: A checkpoint's folder, see :func:`load_state_dict_from_checkpoint_path`.
        context_dir: The folder with the trial's code.
        trial: The trial's class; the one that the checkpoint names, if None. Where it is given, nothing is imported.
        code: Where the trial's code is taken from: ``context_dir``, or ``checkpoint``: from its own ``code/``, which
            checkpoints of a cluster have. That runs code of the checkpoint; do so only if you trust who wrote it.
            This library stays the one that is imported already.

    Returns:
        The model on the CPU in float32, in evaluation mode; of a pipeline, its layers one after the other.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its trial is not in ``context_dir``, cannot be imported, or builds its model together with an
            engine; or ``code`` is neither of the two.
    """
    from determined_ds.trial import returned
    from determined_ds.trial.base import ReconciledTrial
    from determined_ds.trial.pipeline import PipelineTrial

    path, context_dir = Path(path).resolve(), Path(context_dir)
    if code not in (CONTEXT_DIR, CHECKPOINT):
        message, fix = "is not a place of code", f"use {CONTEXT_DIR} or {CHECKPOINT}"
        raise ConfigError(Problem(key="code", value=code, message=message, fix=fix, code="out-of-range"))
    weights = load_state_dict_from_checkpoint_path(path)
    experiment = _experiment_of(path)
    if code == CHECKPOINT:
        context_dir = _own_code(path, experiment)
    with inside(context_dir):
        kind = trial
        if kind is None:
            _check_trusted(experiment)
            kind = trial_class(experiment)
        if not issubclass(kind, ReconciledTrial):
            raise _not_ours(experiment)
        built = bare_trial(kind, experiment, _resolved(experiment), "cpu")
        built.prepare()
        if isinstance(built, PipelineTrial):
            model: torch.nn.Module = chain_of(returned.layers(built, built.build_layers(), 1))
            weights = {_in_chain(name): tensor for name, tensor in weights.items()}
        else:
            model = returned.model(built, built.build_model())
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        named = dict(model.named_parameters(remove_duplicate=False))
        filled = {id(named[name]) for name in weights if name in named}  # a tied weight is written once
        lacking = [name for name in missing if id(named.get(name)) not in filled]
        surplus = f"lacks {', '.join(lacking)}" if lacking else f"also has {', '.join(unexpected)}"
        reason = surplus if lacking or unexpected else ""
    except RuntimeError as error:  # of another shape
        reason = str(error)
    if reason:
        raise CheckpointError(f"checkpoint {path} is of another model than {kind.__name__} builds: {reason}")
    return model.eval()


def _in_chain(name: str) -> str:
    """``3.weight`` -> ``3.inner.weight``."""
    index, _, rest = name.partition(".")
    return f"{index}.inner.{rest}"


def _own_code(path: Path, experiment: Experiment) -> Path:
    """The code in a checkpoint, which is as it was written, as its manifest has just been held against it."""
    own = path / CODE
    module = experiment.trial.partition(":")[0]
    if source_of(module, own) is None:
        missing = (
            f"holds no {module}" if own.is_dir() else "is not there: only checkpoints of a cluster have it"
        )
        fix = f"give the context_dir that holds {module}"
        raise ConfigError(Problem(key="code", value=str(own), message=missing, fix=fix, code="no-code"))
    if differing := differing_library(own):
        logger.warning(
            "warning: determined_ds is that of %s, and other than the checkpoint's in %s modules, e.g. %s; to use the "
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
        config["entrypoint"] = f"python3 -m determined_ds.train {found['trial_cls_spec']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not say what trial wrote it: {error}") from None
    kept = ("name", "entrypoint", "hyperparameters", "data", "reproducibility")
    data = {key: config[key] for key in kept if key in config}
    return parse_experiment(restored(Document(name=str(path / "load_data.json"), data=data), os.environ))


def _check_trusted(experiment: Experiment) -> None:
    """Refuse a trial whose module would be imported from elsewhere than the context directory, which is current.

    Of the first name in a dotted one nothing is run to find it, and all others are looked for below it.
    """
    context_dir = Path.cwd().resolve()
    module = experiment.trial.partition(":")[0]
    package = module.split(".")[0]
    forget_namesake(package)
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # of a module that was made by hand
        spec = None
    if spec is None:
        return  # there is no such module, which the import says
    first = Path(next(iter(spec.submodule_search_locations or ()), None) or spec.origin or "").resolve()
    is_sole = spec.has_location  # else it may lie in several places, and this module in another
    if first.is_relative_to(context_dir) and (is_sole or source_of(module, context_dir) is not None):
        return
    if package in TRUSTED and first.parent == Path(__file__).resolve().parents[2]:
        return
    raise ConfigError(
        Problem(
            key="entrypoint",
            value=experiment.trial,
            origin=experiment.document.origin(("entrypoint",)),
            message=f"the checkpoint names a trial outside {context_dir}, in {first}; importing it would run its code",
            fix="give the context_dir that holds it, or the class itself: trial=MyTrial",
            code="untrusted",
        )
    )


def _constants(hparams: dict[str, Any]) -> dict[str, Any]:
    """What the trial was given, so that nothing in it is taken for a search."""
    return {key: {"type": "const", "val": value} for key, value in hparams.items()}


def _resolved(experiment: Experiment) -> Any:
    """The sizes that it was trained with; all else of a configuration is the engine's, and there is none."""
    given = experiment.hyperparameters.data
    sizes = {key: given[key] for key in SIZES if isinstance(given.get(key), int)}
    batch = {key: given[key] for key in BATCH_KEYS if isinstance(given.get(key), int)}
    slots = (
        sizes.get("data_parallel_world_size", 1)
        * sizes.get("pipe_parallel_size", 1)
        * sizes.get("model_parallel_size", 1)
    )
    document = Document(name="load_data.json", data=sizes, prefix="hyperparameters")
    ds = Document(name="load_data.json", data=batch)
    return reconcile(document, ds, slots=slots, accelerator=assumed_cuda(slots))


def _not_ours(experiment: Experiment) -> ConfigError:
    return ConfigError(
        Problem(
            key="entrypoint",
            value=experiment.trial,
            message="is a DeepSpeedTrial of its own: its model is built together with its engine",
            fix="build the model yourself, and fill it with load_state_dict_from_checkpoint_path",
            code="entrypoint",
        )
    )
