"""What the scenarios train: templates cut short."""

from __future__ import annotations

import os

import yaml

from tests.harness.command import ROOT

# The address of a real master, on which the scenarios then run; without it they run on ours.
REAL = os.environ.get("DET_MASTER", "")
# Of a training that is stopped on its way, and how often it is saved: ours holds it at a checkpoint meanwhile.
LENGTH, SAVED_EVERY = (100, 50) if REAL else (24, 4)

CONST, PIPELINE = "experiments/gpt2/const.yaml", "experiments/gpt2/pipeline.yaml"

# As here: with other threads come other last digits, and trials on one agent of CPU slots share its cores.
ONE_THREAD = "environment.environment_variables=['OMP_NUM_THREADS=1']"
ONE_SLOT = "resources.slots_per_trial=1"


def fit(**batches: int) -> list[str]:
    return [f"hyperparameters.fit.{key}.batches={value}" for key, value in batches.items()]


def batches(length: int) -> tuple[str, ...]:
    """Overrides: train so many batches, validate and save halfway and at the end, and report every second batch."""
    half = length // 2
    periods = {"validation_period": half, "checkpoint_period": half, "reporting_period": 2}
    return (ONE_THREAD, *fit(max_length=length, **periods))


# Six batches on one slot as fast as can be, validated and saved at every second one.
TINY = (
    ONE_THREAD,
    ONE_SLOT,
    "hyperparameters.global_batch_size=16",
    "hyperparameters.sequence_length=16",
    "data.max_validation_sequences=64",
    *fit(max_length=6, validation_period=2, checkpoint_period=2, reporting_period=1),
)
SMALL = ("hyperparameters.sequence_length=32", "data.max_validation_sequences=64")
SHORT = (*batches(10), *SMALL)
LONG_ENOUGH = (*batches(LENGTH), *SMALL, *fit(checkpoint_period=SAVED_EVERY))
EVERY_BATCH = (*LONG_ENOUGH, *fit(reporting_period=1))


def entrypoint(path: str, launcher: str = "torch_distributed", more: str = "") -> str:
    """An override: the entrypoint of a template under a launcher of Determined's, with more words."""
    words = str(yaml.safe_load((ROOT / path).read_text())["entrypoint"])
    return "entrypoint=" + words.replace("launch.torch_distributed", f"launch.{launcher}") + more
