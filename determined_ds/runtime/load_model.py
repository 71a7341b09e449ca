"""A trained model out of a checkpoint, without an engine, a cluster or the slots that trained it."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch

from determined_ds.config.accelerator import assumed_cuda
from determined_ds.config.document import Document
from determined_ds.config.experiment import Experiment, parse_experiment
from determined_ds.config.hyperparameters import SIZES
from determined_ds.config.reconcile import BATCH_KEYS, reconcile
from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.runtime.bare_trial import bare_trial, chain_of, inside, trial_class
from determined_ds.runtime.checkpoint import only_data
from determined_ds.runtime.checkpoint_files import damage_of


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
    folder = path / f"model{engine}"
    if not folder.is_dir():
        there = sorted(found.name for found in path.glob("model*") if found.is_dir())
        raise CheckpointError(
            f"checkpoint {path} has no engine {engine}; it has: {', '.join(there) or 'none'}"
        )
    try:
        with only_data(), contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints what it merges
            return {name: tensor.float() for name, tensor in _weights(path, folder).items()}
    except pickle.UnpicklingError as error:
        message = f"checkpoint {path} holds objects that could run code, and is not loaded: {error}"
        raise CheckpointError(message) from error


def load_model_from_checkpoint_path(path: str | Path, *, context_dir: str | Path = ".") -> torch.nn.Module:
    """The model of a checkpoint, built by its trial and filled with what was trained.

    Determined's ``load_trial_from_checkpoint_path`` (0.38.1) takes trials of the class PyTorchTrial only.

    Args:
        path: A checkpoint's folder, see :func:`load_state_dict_from_checkpoint_path`.
        context_dir: The folder with the trial's code.

    Returns:
        The model on the CPU in float32, in evaluation mode; of a pipeline, its layers one after the other.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its trial cannot be imported, or builds its model together with an engine.
    """
    from determined_ds.trial.base import ReconciledTrial
    from determined_ds.trial.pipeline import PipelineTrial

    path, context_dir = Path(path).resolve(), Path(context_dir)
    weights = load_state_dict_from_checkpoint_path(path)
    experiment = _experiment_of(path)
    with inside(context_dir):
        kind = trial_class(experiment)
        if not issubclass(kind, ReconciledTrial):
            raise _not_ours(experiment)
        trial = bare_trial(kind, experiment, _resolved(experiment), "cpu")
        trial.prepare()
        if isinstance(trial, PipelineTrial):
            model: torch.nn.Module = chain_of(trial.build_layers())
            weights = {_in_chain(name): tensor for name, tensor in weights.items()}
        else:
            model = trial.build_model()
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
        raise CheckpointError(
            f"checkpoint {path} is of another model than {experiment.trial} in {context_dir} builds: {reason}"
        )
    return model.eval()


def _weights(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    layers = sorted(folder.glob("layer_*-model_states.pt"))
    if layers:
        return {
            f"{_index(file)}.{name}": tensor
            for file in layers
            for name, tensor in torch.load(file, map_location="cpu").items()
        }
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        merged: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(path), folder.name)
        return merged
    state: dict[str, Any] = torch.load(folder / "mp_rank_00_model_states.pt", map_location="cpu")
    module: dict[str, torch.Tensor] = state["module"]
    return module


def _index(layer_file: Path) -> int:
    return int(layer_file.name.split("-")[0].removeprefix("layer_"))


def _in_chain(name: str) -> str:
    """``3.weight`` -> ``3.inner.weight``."""
    index, _, rest = name.partition(".")
    return f"{index}.inner.{rest}"


def _experiment_of(path: Path) -> Experiment:
    try:
        found = json.loads((path / "load_data.json").read_text())
        config = {**(found["experiment_config"] or {}), "hyperparameters": _constants(found["hparams"])}
        config["entrypoint"] = f"python3 -m determined_ds.train {found['trial_cls_spec']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not say what trial wrote it: {error}") from None
    kept = ("name", "entrypoint", "hyperparameters", "data", "reproducibility")
    return parse_experiment(
        Document(name=str(path / "load_data.json"), data={key: config[key] for key in kept if key in config})
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
            mend="build the model yourself, and fill it with load_state_dict_from_checkpoint_path",
            code="entrypoint",
        )
    )
