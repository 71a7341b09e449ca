"""A trial without an engine: its model is built, and nothing is trained.

For code that needs the model alone: its sizes, or the weights of a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, EntrypointError, Problem, TrialError
from determined_ds.experiment.experiment import Experiment

SAY_SIZE = "say its size instead: det-ds check --memory --parameters 345M"


def trial_class(spec: str, origin: str = "") -> Any:
    """Import the class ``MODULE:CLASS``; the current folder is its context directory.

    Args:
        spec: It.
        origin: Where it is written.

    Raises:
        EntrypointError: there is no such module or class, or it does not subclass ``DeepSpeedTrial``.
        TrialError: it lacks a method.
    """
    from determined.pytorch import deepspeed as det_ds

    def refusal(message: str, fix: str) -> EntrypointError:
        about = {"key": "entrypoint", "value": spec, "origin": origin, "code": "entrypoint"}
        return EntrypointError(Problem(message=message, fix=fix, **about))

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
        raise refusal(f"there is no module {error.name}", fix) from None

    def is_trial(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, det_ds.DeepSpeedTrial)

    trial = getattr(module, class_name, None)
    if not is_trial(trial):
        own = [name for name, value in vars(module).items() if is_trial(value)]
        own = [name for name in own if vars(module)[name].__module__ == module.__name__]
        fix = f"use one of its trials: {', '.join(own)}" if own else "subclass DataParallelTrial in it"
        message = f"{class_name} must be a subclass of DeepSpeedTrial"
        raise refusal(message if trial is not None else f"module {module_name} has no {class_name}", fix)
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


def bare_trial(kind: Any, experiment: Experiment, resolved: ResolvedConfig, device: str) -> Any:
    """A trial without an engine; ``prepare`` and ``build_model`` are yet to be called.

    Raises:
        ConfigError: it is not a ``ReconciledTrial``.
    """
    from attrdict import AttrDict

    from determined_ds.trial.base import ReconciledTrial
    from determined_ds.trial.of_context import completed_hparams
    from determined_ds.trial.ulysses import SequenceGroup

    if not issubclass(kind, ReconciledTrial):
        message = (
            f"{kind.__name__} subclasses DeepSpeedTrial directly: its model is built together with its engine"
        )
        fix = "build the model, and fill it with load_state_dict_from_checkpoint_path"
        said = (SAY_SIZE, "meta-build") if device == "meta" else (fix, "entrypoint")
        raise ConfigError(experiment.document.problem(("entrypoint",), message, *said))
    trial: Any = kind.__new__(kind)
    hparams = completed_hparams(experiment.hyperparameters.data, resolved)
    trial.context = SimpleNamespace(  # what a trial may call on its context before it has an engine
        distributed=None,
        device=torch.device(device),
        resolved=resolved,
        get_data_config=lambda: dict(experiment.config.get("data") or {}),
        get_experiment_config=lambda: experiment.config,
        get_trial_seed=lambda: experiment.trial_seed,
        get_global_batch_size=lambda: resolved.batch.global_batch_size,
        get_per_slot_batch_size=lambda: resolved.batch.micro_batch_size,
        get_hparams=lambda: dict(hparams),
        get_hparam=hparams.__getitem__,
        wrap_reducer=lambda reducer, *_, **__: reducer,
        disable_dataset_reproducibility_checks=lambda: None,
        to_device=lambda batch: tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch),
    )
    trial.args = AttrDict(hparams)
    trial.resolved = resolved
    trial.sequence = SequenceGroup()  # whole, as of one rank
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
    from deepspeed.pipe import LayerSpec

    tied: dict[str, Any] = {}
    layers = []
    for spec in specs:
        key = getattr(spec, "key", None) if isinstance(spec, LayerSpec) else None  # of a TiedLayerSpec
        inner = tied.get(key) if key is not None else None
        if inner is None:
            inner = spec.build() if isinstance(spec, LayerSpec) else spec
        if key is not None:
            tied[key] = inner
        layers.append(Layer(spec, inner))
    return torch.nn.Sequential(*layers)
