"""A trial without an engine: its model is built, and nothing is trained.

For what wants the model alone: its sizes, or the weights of a checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.errors import EntrypointError, Problem
from determined_ds.experiment.experiment import Experiment


def trial_class(experiment: Experiment) -> Any:
    """The class that an experiment's entrypoint names; the current folder is its context directory.

    Raises:
        EntrypointError: it cannot be imported.
    """
    module, _, name = experiment.trial.partition(":")
    forget_namesake(module.split(".")[0])
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EntrypointError(
            Problem(
                key="entrypoint",
                value=experiment.trial,
                origin=experiment.document.origin(("entrypoint",)),
                message=f"cannot be imported: {error}",
                fix="give the CONTEXT_DIR that holds it, and install what it needs",
                code="entrypoint",
            )
        ) from error


def forget_namesake(package: str) -> None:
    """Let go of a module of another context directory that has the name of one in this, which is current."""
    here = Path.cwd().resolve()
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None or Path(file).resolve().is_relative_to(here):
        return
    if (here / package / "__init__.py").is_file() or (here / f"{package}.py").is_file():
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        importlib.invalidate_caches()


class _Context:
    """What a trial may ask of its context before it has an engine."""

    distributed = None

    def __init__(self, experiment: Experiment, resolved: ResolvedConfig, device: str) -> None:
        self.device = torch.device(device)
        self.resolved = resolved
        self._experiment = experiment

    def get_hparams(self) -> dict[str, Any]:
        batch, topology = self.resolved.batch, self.resolved.topology
        return {
            **self._experiment.hyperparameters.data,
            "global_batch_size": batch.global_batch_size,
            "data_parallel_world_size": topology.data_parallel_world_size,
            "pipe_parallel_size": topology.pipe_parallel_size,
            "model_parallel_size": topology.model_parallel_size,
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
        }

    def get_hparam(self, name: str) -> Any:
        return self.get_hparams()[name]

    def get_data_config(self) -> dict[str, Any]:
        return dict(self._experiment.config.get("data") or {})

    def get_experiment_config(self) -> dict[str, Any]:
        return self._experiment.config

    def get_trial_seed(self) -> int:
        return self._experiment.trial_seed

    def get_global_batch_size(self) -> int:
        return self.resolved.batch.global_batch_size

    def get_per_slot_batch_size(self) -> int:
        return self.resolved.batch.micro_batch_size

    def wrap_reducer(self, reducer: Any, *args: Any, **kwargs: Any) -> Any:
        return reducer

    def disable_dataset_reproducibility_checks(self) -> None:
        """Nothing is trained."""

    def to_device(self, batch: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batch)


def bare_trial(kind: Any, experiment: Experiment, resolved: ResolvedConfig, device: str) -> Any:
    """A trial without an engine, whose model is yet to be built.

    Args:
        kind: A subclass of ``ReconciledTrial``.
        experiment: Its hyperparameters and its data section are the trial's.
        resolved: What was decided of it.
        device: What tensors are moved to.
    """
    from attrdict import AttrDict

    trial = kind.__new__(kind)
    trial.context = _Context(experiment, resolved, device)
    trial.args = AttrDict(trial.context.get_hparams())
    trial.resolved = resolved
    return trial


@contextlib.contextmanager
def inside(context_dir: Path) -> Iterator[None]:
    """As a rank is started: in the context directory, which imports begin at."""
    before = Path.cwd()
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # as DeepSpeed would choose, with a warning on every start
    os.chdir(context_dir)
    sys.path.insert(0, str(context_dir.resolve()))
    try:
        yield
    finally:
        os.chdir(before)
        with contextlib.suppress(ValueError):
            sys.path.remove(str(context_dir.resolve()))


# ----------------------------------------------------------------------------------------- a pipeline


def chain_of(specs: list[Any]) -> Chain:
    """All layers of a pipeline one after the other, on one device."""
    return Chain([Layer(built) for built in _shared(specs)])


def _shared(specs: list[Any]) -> list[tuple[Any, Any]]:
    """(spec, module or function) in order; layers of one key share a module."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied: dict[str, Any] = {}
    built: list[tuple[Any, Any]] = []
    for spec in specs:
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied:
                tied[spec.key] = spec.build()
            built.append((spec, tied[spec.key]))
        else:
            built.append((spec, spec.build() if isinstance(spec, LayerSpec) else spec))
    return built


class Layer(torch.nn.Module):
    """One layer of a pipeline, called as DeepSpeed calls it."""

    def __init__(self, built: tuple[Any, Any]) -> None:
        super().__init__()
        spec, self.inner = built
        self.name = getattr(getattr(spec, "typename", None), "__name__", type(self.inner).__name__)
        self._forward_fn = getattr(spec, "forward_fn", None)

    def forward(self, inputs: Any) -> Any:
        return self._forward_fn(self.inner, inputs) if self._forward_fn else self.inner(inputs)


class Chain(torch.nn.Sequential):
    """A pipeline's layers in their order; the index of each is the one that its checkpoint file has."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__(*layers)
