"""A trained model from a checkpoint, without an engine, a cluster or the slots that trained it."""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.files import damage_of, is_sealed, unverified
from determined_ds.checkpoints.storage import CODE
from determined_ds.checkpoints.weights import open_engine, weights_of
from determined_ds.config.layout import BATCH_KEYS, assumed_cuda
from determined_ds.config.params import PARALLEL_SIZES, SIZES, TRIAL_SEED
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import restored
from determined_ds.experiment.source import source_of
from determined_ds.train.bare_trial import (
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
    stored = open_engine(path, engine)
    weights = weights_of(path, stored, dtype=torch.float32, average=average)
    found = {name: each.whole().float() for name, each in weights.items()}
    return {**found, **{alias: found[name] for alias, name in stored.index.aliases.items()}}


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
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    path = Path(path).resolve()
    if code not in (CONTEXT_DIR, CHECKPOINT):
        message, fix = "is not a valid place of code", f"use {CONTEXT_DIR} or {CHECKPOINT}"
        raise ConfigError(Problem(key="code", value=code, message=message, fix=fix, code="out-of-range"))
    weights = load_state_dict_from_checkpoint_path(path, average=average)
    with trial_of(path, Path(context_dir), own_code=code == CHECKPOINT, kind=trial) as built:
        name = type(built).__name__
        if isinstance(built, PipelineTrial):
            model: torch.nn.Module = chain_of(returned.layers(built, built.build_layers(), 1))
            weights = {each.replace(".", ".inner.", 1): tensor for each, tensor in weights.items()}
        else:
            model = returned.model(built, built.build_model())
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        named = dict(model.named_parameters(remove_duplicate=False))
        filled = {id(named[each]) for each in weights if each in named}  # a tied weight is written once
        lacking = [each for each in missing if id(named.get(each)) not in filled]
        reason = f"lacks {', '.join(lacking)}" if lacking else ""
        if unexpected and not lacking:
            reason = f"also has {', '.join(unexpected)}"
    except RuntimeError as error:  # of another shape
        reason = str(error)
    if reason:
        raise CheckpointError(f"checkpoint {path} is of another model than {name} builds: {reason}")
    return model.eval()


@contextlib.contextmanager
def trial_of(path: Path, context_dir: Path, *, own_code: bool = False, kind: Any = None) -> Iterator[Any]:
    """The trial that wrote a checkpoint, prepared and without an engine; inside, its code can be called.

    Args:
        path: The checkpoint's folder.
        context_dir: With the trial's code.
        own_code: Whether the checkpoint's copy of the code is taken in place of it.
        kind: The trial's class; None: the one that the checkpoint names.

    Raises:
        CheckpointError: the checkpoint does not name a trial.
        ConfigError: the trial lies outside ``context_dir``, or cannot be imported or built.
    """
    experiment = _experiment_of(path)
    if own_code:
        context_dir = _own_code(path, experiment.trial.partition(":")[0])
    given = experiment.hyperparameters.data
    # The sizes that it was trained with: all else in a configuration concerns the engine alone.
    sizes = {key: given[key] for key in SIZES if isinstance(given.get(key), int)}
    batch = {key: given[key] for key in BATCH_KEYS if isinstance(given.get(key), int)}
    slots = math.prod(sizes.get(each, 1) for each in ("data_parallel_world_size", *PARALLEL_SIZES))
    document = Document(name="load_data.json", data=sizes, prefix="hyperparameters")
    ds = Document(name="load_data.json", data=batch)
    resolved = reconcile(document, ds, slots=slots, accelerator=assumed_cuda(slots))
    with inside(context_dir):
        if kind is None:
            _check_trusted(experiment)
            kind = trial_class(experiment)
        trial = bare_trial(kind, experiment, resolved, "cpu")
        trial.prepare()
        yield trial


def _experiment_of(path: Path) -> Experiment:
    try:
        found = json.loads((path / "load_data.json").read_text())
        if not found["trial_cls_spec"]:
            raise CheckpointError(
                f"checkpoint {path} was written by a script, which alone can build its model\n"
                "  fix: build it, and model.load_state_dict(load_state_dict_from_checkpoint_path(path))"
            )
        seed = {TRIAL_SEED: found[TRIAL_SEED]} if TRIAL_SEED in found else {}
        # As constants, so nothing in them is taken for a range to search.
        hparams = {
            key: {"type": "const", "val": value} for key, value in {**seed, **found["hparams"]}.items()
        }
        config = {**(found["experiment_config"] or {}), "hyperparameters": hparams}
        config["entrypoint"] = f"python3 -m determined_ds.train {found['trial_cls_spec']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not say what trial wrote it: {error}") from None
    kept = ("name", "entrypoint", "hyperparameters", "data", "reproducibility")
    data = {key: config[key] for key in kept if key in config}
    return parse_experiment(restored(Document(name=str(path / "load_data.json"), data=data), os.environ))


def _own_code(path: Path, module: str) -> Path:
    """The code in a checkpoint, which has just been compared with its manifest."""
    own = path / CODE
    if source_of(module, own) is None:
        lacks = (
            f"holds no {module}" if own.is_dir() else "is missing: only checkpoints from a cluster have it"
        )
        fix = f"give the context_dir that holds {module}"
        raise ConfigError(Problem(key="code", value=str(own), message=lacks, fix=fix, code="no-code"))
    stored, here = own / "determined_ds", Path(__file__).resolve().parents[1]
    names = [str(path.relative_to(stored)) for path in sorted(stored.rglob("*.py"))]
    _, changed, missing = filecmp.cmpfiles(stored, here, names, shallow=False)
    if stored.resolve() != here and (differing := sorted([*changed, *missing])):
        logger.warning(
            "warning: determined_ds in %s differs from the checkpoint's in %s modules, e.g. %s; to use the "
            "checkpoint's, start Python with PYTHONPATH=%s",
            *(here, len(differing), differing[0], own),
        )
    return own


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
    is_here = first.is_relative_to(context_dir) and (is_sole or source_of(module, context_dir) is not None)
    if not is_here and (package not in TRUSTED or first.parent != Path(__file__).resolve().parents[2]):
        message = (
            f"the checkpoint names a trial outside {context_dir}, in {first}; importing it would run its code"
        )
        fix = "give the context_dir that holds it, or the class itself: trial=MyTrial"
        raise ConfigError(entrypoint_problem(experiment, message, fix, "untrusted"))
