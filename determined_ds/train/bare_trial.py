"""A trial without an engine, for its model alone: the sizes of the model, or the trained weights of a checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from determined_ds.checkpoints.files import LOAD_DATA
from determined_ds.config.layout import BATCH_KEYS, assumed_cuda
from determined_ds.config.params import PARALLEL_SIZES, SIZES, TRIAL_SEED
from determined_ds.config.resolve import ResolvedConfig, reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import CheckpointError, ConfigError, EntrypointError, Problem, TrialError
from determined_ds.experiment.secrets import restored

SAY_SIZE = "say its size instead: det-ds check --memory --parameters 345M"


def trial_class(spec: str, origin: str = "") -> Any:
    """Import the class ``MODULE:CLASS``, which ``origin`` names; the current folder is its context directory."""
    from determined.pytorch import deepspeed as det_ds

    about = {"key": "entrypoint", "value": spec, "origin": origin, "code": "entrypoint"}
    module_name, _, class_name = spec.partition(":")
    package, here = module_name.split(".")[0], Path.cwd().resolve()
    file = getattr(sys.modules.get(package), "__file__", None)
    is_here = (here / package / "__init__.py").is_file() or (here / f"{package}.py").is_file()
    if file is not None and is_here and not Path(file).resolve().is_relative_to(here):
        # A module of another context directory that this process has worked in has the same name.
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the trial imports is missing: its traceback says where
        fix = "check the path in the entrypoint, and give the CONTEXT_DIR that holds it"
        raise EntrypointError(Problem(message=f"there is no module {error.name}", fix=fix, **about)) from None
    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    trials = [each for each in kinds if issubclass(each, det_ds.DeepSpeedTrial)]
    trial = getattr(module, class_name, None)
    if trial not in trials:
        own = [each.__name__ for each in trials if each.__module__ == module.__name__]
        fix = f"use one of its trials: {', '.join(own)}" if own else "subclass DataParallelTrial in it"
        message = f"{class_name} must be a subclass of DeepSpeedTrial"
        message = message if trial is not None else f"module {module_name} has no {class_name}"
        raise EntrypointError(Problem(message=message, fix=fix, **about))
    if missing := sorted(getattr(trial, "__abstractmethods__", ())):
        message = f"does not define {', '.join(missing)}"
        fix = "define it in the class, or in one that it derives from"
        raise TrialError(Problem(key=class_name, origin=spec, message=message, fix=fix, code="abstract"))
    return trial


@contextlib.contextmanager
def inside(context_dir: Path) -> Iterator[None]:
    """As a rank starts: in the context directory, which is first in the import path."""
    before, folder = Path.cwd(), str(context_dir.resolve())
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would choose it with a warning
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        os.chdir(before)
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def bare_trial(
    kind: Any,
    hyperparameters: Mapping[str, Any],
    exp_conf: Mapping[str, Any],
    seed: int,
    resolved: ResolvedConfig,
    device: str,
) -> Any:
    """A trial without an engine; ``prepare`` and ``build_model`` are yet to be called."""
    from attrdict import AttrDict

    from determined_ds.trial.base import ReconciledTrial

    if not issubclass(kind, ReconciledTrial):
        message = (
            f"{kind.__name__} subclasses DeepSpeedTrial directly: its model is built together with its engine"
        )
        fix = "build the model, and fill it with load_state_dict_from_checkpoint_path"
        fix, code = (SAY_SIZE, "meta-build") if device == "meta" else (fix, "entrypoint")
        raise ConfigError(Problem(key="entrypoint", message=message, fix=fix, code=code))
    trial: Any = kind.__new__(kind)
    hparams = resolved.completed(hyperparameters)
    trial.context = SimpleNamespace(  # what a trial may call on its context before it has an engine
        distributed=None,
        device=torch.device(device),
        resolved=resolved,
        get_data_config=lambda: dict(exp_conf.get("data") or {}),
        get_experiment_config=lambda: exp_conf,
        get_trial_seed=lambda: seed,
        get_global_batch_size=lambda: resolved.batch.global_batch_size,
        get_per_slot_batch_size=lambda: resolved.batch.micro_batch_size,
        get_hparams=lambda: dict(hparams),
        get_hparam=hparams.__getitem__,
        wrap_reducer=lambda reducer, *_, **__: reducer,
        disable_dataset_reproducibility_checks=lambda: None,
        to_device=lambda batch: tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch),
    )
    trial.args, trial.resolved = AttrDict(hparams), resolved
    return trial


class Layer(torch.nn.Module):
    """One layer of a pipeline, called as DeepSpeed calls it: the module or function ``inner`` that a spec makes."""

    def __init__(self, spec: Any, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.name = getattr(getattr(spec, "typename", None), "__name__", type(inner).__name__)
        self.tied_key: str = getattr(spec, "key", "")
        self._forward_fn = getattr(spec, "forward_fn", None)

    def forward(self, inputs: Any) -> Any:
        return self._forward_fn(self.inner, inputs) if self._forward_fn else self.inner(inputs)


def chain_of(specs: list[Any]) -> torch.nn.Sequential:
    """All layers of a pipeline one after the other, on one device; tied layers of one key share a module.

    The index of each is the one in the name of its checkpoint file.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    built, layers = dict[Any, Any](), []
    for spec in specs:
        key = spec.key if isinstance(spec, TiedLayerSpec) else object()
        if key not in built:
            built[key] = spec.build() if isinstance(spec, LayerSpec) else spec
        layers.append(Layer(spec, built[key]))
    return torch.nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------- of a checkpoint


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
    from determined_ds.checkpoints.reader import open_engine, weights_of

    path = Path(path)
    stored = open_engine(path, engine, verify=verify)
    weights = weights_of(path, stored, dtype=torch.float32)
    found = {name: each.whole().float() for name, each in weights.items()}
    return {**found, **{alias: found[name] for alias, name in stored.index.aliases.items()}}


def load_model_from_checkpoint_path(
    path: str | Path, *, context_dir: str | Path = ".", trial: Any = None
) -> torch.nn.Module:
    """The model of a checkpoint, built by its trial, with the trained weights.

    This runs the checkpoint's code, as Determined's ``load_trial_from_checkpoint_path`` (0.38.1, for trials of the
    class PyTorchTrial only) does: it imports whatever class the checkpoint names, and calls it. Load only what you
    trust.

    Args:
        path: A checkpoint's folder, see :func:`load_state_dict_from_checkpoint_path`.
        context_dir: The folder with the trial's code; ``code`` in a checkpoint from a cluster is a copy of it.
        trial: The trial's class; the one that the checkpoint names, if None. If given, nothing is imported.

    Returns:
        The model on the CPU in float32, in evaluation mode; of a pipeline, its layers one after the other.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its trial cannot be imported, or builds its model together with an engine.
    """
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    path = Path(path).resolve()
    weights = load_state_dict_from_checkpoint_path(path)
    with trial_of(path, Path(context_dir), kind=trial) as built:
        if isinstance(built, PipelineTrial):
            model: torch.nn.Module = chain_of(returned.layers(built, built.build_layers(), 1))
            weights = {each.replace(".", ".inner.", 1): tensor for each, tensor in weights.items()}
        else:
            model = returned.model(built, built.build_model())
    named = dict(model.named_parameters(remove_duplicate=False))
    filled = {id(named[name]): tensor for name, tensor in weights.items() if name in named}
    tied = {name: filled[id(each)] for name, each in named.items() if id(each) in filled}
    try:
        model.load_state_dict({**tied, **weights})
    except RuntimeError as error:
        name = type(built).__name__
        raise CheckpointError(f"checkpoint {path} is of another model than {name} builds: {error}") from None
    return model.eval()


@contextlib.contextmanager
def trial_of(path: Path, context_dir: Path, *, kind: Any = None) -> Iterator[Any]:
    """The trial that wrote a checkpoint, prepared and without an engine; inside, its code can be called.

    Its class is ``kind``, or else the one that the checkpoint names, in ``context_dir``.
    """
    try:
        found = json.loads((path / LOAD_DATA).read_text())
        spec, config = found["trial_cls_spec"], found["experiment_config"] or {}
        kept = {key: config[key] for key in ("name", "data", "reproducibility") if key in config}
        hidden = Document(
            name=str(path / LOAD_DATA), data={**kept, "hyperparameters": dict(found["hparams"])}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not say what trial wrote it: {error}") from None
    if not spec:
        raise CheckpointError(
            f"checkpoint {path} was written by a script, which alone can build its model\n"
            "  fix: build it, and model.load_state_dict(load_state_dict_from_checkpoint_path(path))"
        )
    exp_conf = restored(hidden, os.environ).data
    hparams = exp_conf["hyperparameters"]
    # The sizes that it was trained with: all else in a configuration concerns the engine alone.
    sizes = {key: hparams[key] for key in SIZES if isinstance(hparams.get(key), int)}
    slots = math.prod(sizes.get(each, 1) for each in ("data_parallel_world_size", *PARALLEL_SIZES))
    document = Document(name=LOAD_DATA, data=sizes, prefix="hyperparameters")
    batch = {key: hparams[key] for key in BATCH_KEYS if isinstance(hparams.get(key), int)}
    ds = Document(name=LOAD_DATA, data=batch)
    resolved = reconcile(document, ds, slots=slots, accelerator=assumed_cuda(slots))
    with inside(context_dir):
        try:
            kind = kind or trial_class(spec)
        except ImportError as error:
            raise CheckpointError(f"the trial of checkpoint {path} cannot be imported: {error}") from error
        trial = bare_trial(kind, hparams, exp_conf, found.get(TRIAL_SEED, 0), resolved, "cpu")
        trial.prepare()
        yield trial
