"""What the scenarios train: templates cut short."""

from __future__ import annotations

import os

import yaml

from tests.harness.command import ROOT

# The address of a real master, on which the scenarios then run; without it they run on ours.
REAL = os.environ.get("DET_MASTER", "")
# Of a training that is stopped on its way, and how often it is saved: ours holds it at a checkpoint meanwhile.
LENGTH, SAVED_EVERY = (100, 50) if REAL else (40, 4)

CONST, PIPELINE, SEARCH, ZB_H1 = (
    f"experiments/gpt2/{name}.yaml" for name in ("const", "pipeline", "search", "zb_h1")
)
HF_TRAINER = "experiments/hf_trainer/const.yaml"
TEMPLATES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "experiments").glob("*/*.yaml"))]
# Those that need no CUDA, by the second line of their comments.
ON_CPU = [path for path in TEMPLATES if "CPU" in (ROOT / path).read_text().splitlines()[1]]

# As here: with other threads come other last digits, and trials on one agent of CPU slots share its cores.
ONE_THREAD = "environment.environment_variables=['OMP_NUM_THREADS=1']"
ONE_SLOT = "resources.slots_per_trial=1"


def batches(length: int) -> tuple[str, ...]:
    """Overrides: train so many batches, validate and save halfway and at the end, and report every second batch."""
    fit = {"max_length": length, "validation_period": length // 2, "checkpoint_period": length // 2}
    periods = {**fit, "reporting_period": 2}
    return (ONE_THREAD, *(f"hyperparameters.fit.{key}.batches={value}" for key, value in periods.items()))


def tiny(length: int) -> tuple[str, ...]:
    """Overrides: so many batches on one slot as fast as can be, validated and saved at every second one."""
    periods = {"max_length": length, "validation_period": 2, "checkpoint_period": 2, "reporting_period": 1}
    return (
        ONE_THREAD,
        ONE_SLOT,
        "hyperparameters.global_batch_size=16",
        "hyperparameters.sequence_length=16",
        "data.max_validation_sequences=64",
        *(f"hyperparameters.fit.{key}.batches={value}" for key, value in periods.items()),
    )


SMALL = ("hyperparameters.sequence_length=32", "data.max_validation_sequences=64")
SHORT = (*batches(10), *SMALL)
LONG_ENOUGH = (*batches(LENGTH), *SMALL, f"hyperparameters.fit.checkpoint_period.batches={SAVED_EVERY}")
EVERY_BATCH = (*LONG_ENOUGH, "hyperparameters.fit.reporting_period.batches=1")


def entrypoint(path: str, *replaced: tuple[str, str], more: str = "") -> str:
    """An override: the entrypoint of a template, of which something is replaced."""
    words = str(yaml.safe_load((ROOT / path).read_text())["entrypoint"])
    for old, new in replaced:
        words = words.replace(old, new)
    return f"entrypoint={words}{more}"


def by_launcher(path: str, name: str) -> str:
    """An override: the entrypoint of a template under another launcher of Determined's."""
    return entrypoint(path, ("launch.torch_distributed", f"launch.{name}"))
