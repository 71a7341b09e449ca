"""Activation checkpointing is counted once, and alike by ``check``, ``estimate`` and the tuner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.check.fits_gpu import memory_problem
from determined_ds.cli.main import main
from determined_ds.config.accelerator import assumed_cuda
from determined_ds.config.strategy import Strategy, is_asked_of_model
from determined_ds.memory import ModelShape, memory_per_rank
from determined_ds.memory.activations import activation_bytes
from determined_ds.memory.fitting import device_bytes
from determined_ds.memory.model_shape import MeasuredActivations
from determined_ds.tune.choice import read_base
from determined_ds.tune.cost import arithmetic, memory_bytes
from determined_ds.tune.variants import Variant, decided
from tests.ranks import ROOT
from tests.tune.bases import document_of

REPLICATED, PIPELINE = Path("experiments/gpt2/const.yaml"), Path("experiments/gpt2/pipeline.yaml")
LARGE = ("hyperparameters.sequence_length=1024", "hyperparameters.model_size=small")
BY_SWITCH = "hyperparameters.activation_checkpointing=true"
BY_INTERVAL = "hyperparameters.activation_checkpoint_interval=1"
BY_JSON = "hyperparameters.overwrite_deepspeed_args.pipeline.activation_checkpoint_interval=1"
WAYS = [
    (REPLICATED, BY_SWITCH),
    (REPLICATED, BY_INTERVAL),
    (PIPELINE, BY_SWITCH),
    (PIPELINE, BY_INTERVAL),
    (PIPELINE, BY_JSON),
]


def variant_of(config: Path, *overrides: str) -> Variant:
    base = read_base(document_of(config, *LARGE, *overrides), ROOT, assumed_cuda(2))
    return decided(base, "as it is", base.own)


def shape_of(variant: Variant) -> ModelShape:
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    assert variant.experiment is not None
    assert variant.resolved is not None
    return shape_of_experiment(variant.experiment, variant.resolved, ROOT)


def estimated(config: Path, *overrides: str) -> dict[str, Any]:
    """The row of ``det-ds estimate`` that is the experiment's own."""
    words = ["estimate", str(ROOT / config), str(ROOT), "--json"]
    result = CliRunner().invoke(main, [*words, *(word for each in overrides for word in ("--set", each))])
    assert result.exit_code == 0, result.output
    resolved = variant_of(config, *overrides).resolved
    assert resolved is not None
    stages = resolved.topology.pipe_parallel_size
    own = (resolved.zero_stage, stages, False)
    keys = ("zero_stage", "pipe_parallel_size", "offload_optimizer")
    rows = [row for row in json.loads(result.stdout)["strategies"] if tuple(row[key] for key in keys) == own]
    found: dict[str, Any] = rows[0]
    return found


@pytest.mark.parametrize(("config", "way"), [*WAYS, (REPLICATED, "name=plain"), (PIPELINE, "name=plain")])
def test_all_three_count_the_same_bytes(config: Path, way: str) -> None:
    variant = variant_of(config, way)
    shape = shape_of(variant)
    row = estimated(config, *LARGE, way)
    total = row["total_bytes"]
    assert row["activation_checkpointing"] is (way != "name=plain")
    assert memory_bytes(variant, shape) == total
    assert variant.resolved is not None
    assert variant.experiment is not None

    def refused(gpu_memory_bytes: int) -> bool:
        assert variant.resolved is not None
        assert variant.experiment is not None
        hyperparameters = variant.experiment.hyperparameters
        return (
            memory_problem(
                shape, variant.resolved, gpu_memory_bytes=gpu_memory_bytes, hyperparameters=hyperparameters
            )
            is not None
        )

    assert not refused(device_bytes(total))
    assert refused(device_bytes(total - 2**20))


@pytest.mark.parametrize(("config", "way"), WAYS)
def test_every_way_to_turn_it_on_saves_memory_and_costs_time(config: Path, way: str) -> None:
    """A fifth of the activations is left, or less; the hyperparameter, the interval and the JSON's are one."""
    on, off = variant_of(config, way), variant_of(config)
    assert (
        estimated(config, *LARGE, way)["activations_bytes"]
        < 0.5 * estimated(config, *LARGE)["activations_bytes"]
    )
    assert arithmetic(on, shape_of(on)) > 1.2 * arithmetic(off, shape_of(off))


def test_the_json_has_options_for_it_and_turns_nothing_on() -> None:
    options = "hyperparameters.overwrite_deepspeed_args.activation_checkpointing.partition_activations=true"
    variant = variant_of(REPLICATED, options)
    assert variant.resolved is not None
    assert shape_of(variant).checkpoint_interval in (None, 0)
    assert not variant.resolved.strategy.activation_checkpointing


@pytest.mark.parametrize("said", [False, None, 0, "none", "Off", ""])
def test_what_is_off(said: Any) -> None:
    assert not is_asked_of_model({"gradient_checkpointing": said})
    assert is_asked_of_model({"gradient_checkpointing": "full"})


def test_what_was_measured_with_it_is_not_made_less_again() -> None:
    measured = MeasuredActivations(bytes_per_sample=10**6)
    shape = ModelShape(
        num_parameters=10**6, num_layers=4, hidden_size=64, sequence_length=16, activations=measured
    )
    seen = replace(shape, activations=replace(measured, is_checkpointed=True))
    on, off = Strategy(activation_checkpointing=True), Strategy()
    assert activation_bytes(seen, on) == activation_bytes(shape, off) > activation_bytes(shape, on)
    assert memory_per_rank(seen, on).activations_bytes == 10**6
