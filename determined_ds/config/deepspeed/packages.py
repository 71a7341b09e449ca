"""Packages that a DeepSpeed JSON asks for and that DeepSpeed does not bring: its monitors, and the mu-optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import Problem

# Section -> the module that it imports, and the package that has it.
# Source: deepspeed 0.19.8 monitor/utils.py.
MONITORS = {
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet-ml>=3.41"),
    "tensorboard": ("tensorboard", "tensorboard"),
}
# Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer.
MU_OPTIMIZERS = ("muadam", "muadamw", "musgd")


def missing_packages(ds: Document) -> list[Problem]:
    """A problem for each package that a DeepSpeed JSON needs and that is not installed on this machine."""
    return [
        ds.problem(
            path,
            f"needs the package {package}, which is not installed on this machine",
            f"pip install '{package}' (on a cluster: in environment.image, or in startup-hook.sh), or {instead}",
            "missing-package",
        )
        for path, module, package, instead in _needed(ds)
        if find_spec(module) is None
    ]


def _needed(ds: Document) -> Iterator[tuple[KeyPath, str, str, str]]:
    for section, (module, package) in MONITORS.items():
        if ds.get((section, "enabled")) is True:
            yield (section, "enabled"), module, package, "write false"
    if str(ds.get(("optimizer", "type"))).lower() in MU_OPTIMIZERS:
        yield ("optimizer", "type"), "mup", "mup", "use AdamW"
