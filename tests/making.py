"""What the tests of the pure rooms are written with: accelerators, documents and one door to `reconcile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import ResolvedConfig, reconcile
from determined_ds.config.resolve import Where, resolve
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_json, parse_yaml
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.experiment import Experiment

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*/*.yaml"))
DS_CONFIGS = sorted((ROOT / "experiments" / "deepspeed").glob("*.json"))

CPU = Accelerator(name="cpu", num_devices=64, bf16=False, fp16=False)
CUDA = Accelerator(name="cuda", num_devices=64, bf16=True, fp16=True)
OLD_CUDA = Accelerator(name="cuda", num_devices=64, bf16=False, fp16=True)

ENTRYPOINT = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:Trial"


def hyperparameters(source: str | dict[str, Any]) -> Document:
    """Hyperparameters from YAML text (named hp.yaml, with places) or from a mapping (without)."""
    if isinstance(source, dict):
        return Document(name="hyperparameters", data=source, prefix="hyperparameters")
    read = parse_yaml(source, "hp.yaml")
    return Document(name=read.name, data=read.data, places=read.places, prefix="hyperparameters")


def ds_json(source: str | dict[str, Any]) -> Document:
    """A DeepSpeed JSON from its text (named ds.json, with places) or from a mapping (without)."""
    return (
        Document(name="ds.json", data=source) if isinstance(source, dict) else parse_json(source, "ds.json")
    )


def decide(
    hp: str | dict[str, Any] = "global_batch_size: 8",
    ds: str | dict[str, Any] = "{}",
    *,
    slots: int = 2,
    accelerator: Accelerator = CPU,
    slots_origin: str = "",
    machines: int = 1,
) -> ResolvedConfig:
    """`reconcile` with little said."""
    return reconcile(
        hyperparameters(hp),
        ds_json(ds),
        slots=slots,
        accelerator=accelerator,
        slots_origin=slots_origin,
        machines=machines,
    )


def resolved_of(
    experiment: Experiment, accelerator: Accelerator = CUDA, *, context_dir: Path = ROOT
) -> ResolvedConfig:
    """What the middle point of an experiment runs with."""
    where = Where(context_dir=context_dir, accelerator=accelerator, slots=experiment.slots)
    return resolve(experiment.hyperparameters, where)


def refusals(step: Callable[[], Any]) -> tuple[Problem, ...]:
    """The problems for which a step is refused. Each says what is wrong, and how to fix it."""
    with pytest.raises(ConfigError) as caught:
        step()
    for problem in caught.value.problems:
        assert problem.key or problem.origin
        assert problem.message
        assert problem.fix, problem
    return caught.value.problems


def refusal(step: Callable[[], Any]) -> Problem:
    """The one problem for which a step is refused."""
    (problem,) = refusals(step)
    return problem
