"""A trained model from a checkpoint, without an engine, a cluster or the slots that trained it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from determined_ds.checkpoints.files import LOAD_DATA
from determined_ds.checkpoints.reader import open_engine, weights_of
from determined_ds.config.layout import BATCH_KEYS, assumed_cuda
from determined_ds.config.params import PARALLEL_SIZES, SIZES, TRIAL_SEED
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import CheckpointError
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.secrets import restored
from determined_ds.train.bare_trial import bare_trial, chain_of, inside, trial_class


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
    stored = open_engine(path, engine, verify=verify)
    weights = weights_of(path, stored, dtype=torch.float32, average=average)
    found = {name: each.whole().float() for name, each in weights.items()}
    return {**found, **{alias: found[name] for alias, name in stored.index.aliases.items()}}


def load_model_from_checkpoint_path(
    path: str | Path,
    *,
    context_dir: str | Path = ".",
    trial: Any = None,
    average: str | None = None,
) -> torch.nn.Module:
    """The model of a checkpoint, built by its trial, with the trained weights.

    This runs the checkpoint's code, as Determined's ``load_trial_from_checkpoint_path`` (0.38.1, for trials of the
    class PyTorchTrial only) does: it imports whatever class the checkpoint names, and calls it. Load only what you
    trust.

    Args:
        path: A checkpoint's folder, see :func:`load_state_dict_from_checkpoint_path`.
        context_dir: The folder with the trial's code; ``code`` in a checkpoint from a cluster is a copy of it.
        trial: The trial's class; the one that the checkpoint names, if None. If given, nothing is imported.
        average: See :func:`load_state_dict_from_checkpoint_path`.

    Returns:
        The model on the CPU in float32, in evaluation mode; of a pipeline, its layers one after the other.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its trial cannot be imported, or builds its model together with an engine.
    """
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    path = Path(path).resolve()
    weights = load_state_dict_from_checkpoint_path(path, average=average)
    with trial_of(path, Path(context_dir), kind=trial) as built:
        name = type(built).__name__
        if isinstance(built, PipelineTrial):
            model: torch.nn.Module = chain_of(returned.layers(built, built.build_layers(), 1))
            weights = {each.replace(".", ".inner.", 1): tensor for each, tensor in weights.items()}
        else:
            model = returned.model(built, built.build_model())
    named = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(named[each]) for each in weights if each in named}  # a tied weight is written once
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        lacking = [each for each in missing if id(named.get(each)) not in filled]
        verb, names = ("lacks", lacking) if lacking else ("also has", unexpected)
        reason = f"{verb} {', '.join(names)}" if names else ""
    except RuntimeError as error:  # of another shape
        reason = str(error)
    if reason:
        raise CheckpointError(f"checkpoint {path} is of another model than {name} builds: {reason}")
    return model.eval()


@contextlib.contextmanager
def trial_of(path: Path, context_dir: Path, *, kind: Any = None) -> Iterator[Any]:
    """The trial that wrote a checkpoint, prepared and without an engine; inside, its code can be called.

    Args:
        path: The checkpoint's folder.
        context_dir: With the trial's code.
        kind: The trial's class; None: the one that the checkpoint names.

    Raises:
        CheckpointError: the checkpoint does not name a trial.
        ConfigError: the trial cannot be imported or built.
    """
    experiment = _experiment_of(path)
    given = experiment.hyperparameters.data
    # The sizes that it was trained with: all else in a configuration concerns the engine alone.
    sizes = {key: given[key] for key in SIZES if isinstance(given.get(key), int)}
    batch = {key: given[key] for key in BATCH_KEYS if isinstance(given.get(key), int)}
    slots = math.prod(sizes.get(each, 1) for each in ("data_parallel_world_size", *PARALLEL_SIZES))
    document = Document(name=LOAD_DATA, data=sizes, prefix="hyperparameters")
    ds = Document(name=LOAD_DATA, data=batch)
    resolved = reconcile(document, ds, slots=slots, accelerator=assumed_cuda(slots))
    with inside(context_dir):
        try:
            kind = kind or trial_class(experiment.trial)
        except ImportError as error:
            raise CheckpointError(f"the trial of checkpoint {path} cannot be imported: {error}") from error
        trial = bare_trial(kind, experiment, resolved, "cpu")
        trial.prepare()
        yield trial


def _experiment_of(path: Path) -> Experiment:
    """The experiment that wrote a checkpoint, as much of it as builds its trial."""
    try:
        found = json.loads((path / LOAD_DATA).read_text())
        if not found["trial_cls_spec"]:
            raise CheckpointError(
                f"checkpoint {path} was written by a script, which alone can build its model\n"
                "  fix: build it, and model.load_state_dict(load_state_dict_from_checkpoint_path(path))"
            )
        seed = {TRIAL_SEED: found[TRIAL_SEED]} if TRIAL_SEED in found else {}
        # As constants, so nothing in them is taken for a range to search.
        point = {key: {"type": "const", "val": value} for key, value in {**seed, **found["hparams"]}.items()}
        config = found["experiment_config"] or {}
        data = {key: config[key] for key in ("name", "data", "reproducibility") if key in config}
        data |= {
            "entrypoint": f"python3 -m determined_ds.train {found['trial_cls_spec']}",
            "hyperparameters": point,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not say what trial wrote it: {error}") from None
    return parse_experiment(restored(Document(name=str(path / LOAD_DATA), data=data), os.environ))
