"""The estimate against real DeepSpeed engines on two ranks, and against pipelines, within 10 %.

At the end of the last backward pass all model states are there and hardly anything else: the batch is eight tokens, the
buckets are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds import ResolvedConfig
from tests.harness.ranks import ROOT, Ranks
from tests.memory.engines import VOCAB_SIZE, measure, model_parameters
from tests.memory.estimates import estimate, resolved
from tests.memory.piped import train
from tests.package import bytes_per_rank

HIDDEN, LAYERS = 256, 4
BUCKET = 4 * HIDDEN**2  # elements that hold the largest parameter, and not much more
CASES = [(precision, None, stage) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
CASES += [("bf16", "fp32", stage) for stage in (1, 2, 3)]


def decided(
    stage: int, precision: str = "fp32", *, zero: dict[str, Any] | None = None, **given: Any
) -> ResolvedConfig:
    """The configuration of a training of one sample a micro-batch on two ranks."""
    small = {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    more = {"zero_force_ds_cpu_optimizer": False, "optimizer": adam, **given.pop("more", {})}
    return resolved(stage, precision, ranks=2, zero={**small, **(zero or {})}, more=more, **given)


def estimated(config: ResolvedConfig) -> dict[str, int]:
    """Bytes of a rank by kind, ``states`` and ``device`` (all but those on the host)."""
    sizes = {"num_parameters": model_parameters(HIDDEN, LAYERS)}
    if config.topology.model_parallel_size > 1:
        sizes |= {"hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE}
    else:
        sizes["largest_layer_parameters"] = 4 * HIDDEN * (HIDDEN + 1)
    found = bytes_per_rank(config, **sizes)
    states = sum(found[kind] for kind in ("parameters", "gradients", "optimizer_states"))
    return {**found, "states": states, "device": states + found["activations"] + found["buffers"]}


def check_states(ranks: Ranks, config: ResolvedConfig, ds_config: dict[str, Any]) -> None:
    found, element = estimated(config), 2 if ds_config["bf16"]["enabled"] else 4
    for moments in ranks.run(measure, HIDDEN, LAYERS, ds_config):
        # States, a bucket or two, and what of ZeRO 3's gathered parameters is not yet let go.
        buckets = min(found["buffers"], 2 * element * BUCKET)
        assert moments["backward ends"] - buckets == pytest.approx(found["states"], rel=0.1)


@pytest.mark.parametrize(("precision", "grad_accum_dtype", "stage"), CASES)
def test_model_states_are_within_ten_percent(
    precision: str, grad_accum_dtype: str | None, stage: int, two_ranks: Ranks
) -> None:
    more = {"data_types": {"grad_accum_dtype": grad_accum_dtype}} if grad_accum_dtype else {}
    config = decided(stage, precision, more=more)
    check_states(two_ranks, config, config.ds_config)


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("bf16", 1), ("bf16", 3)])
def test_model_states_of_ranks_that_share_layers_are_within_ten_percent(
    precision: str, stage: int, two_ranks: Ranks
) -> None:
    """Tensor parallel: blocks and head are cut in two, the embedding is whole on both."""
    specs = [
        {"patterns": [".*up.weight"], "partition_type": "column"},
        {"patterns": [f"{LAYERS + 1}.weight"], "partition_type": "column", "gather_output": True},
        {"patterns": [".*down.weight"], "partition_type": "row"},
    ]
    cut = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    config = decided(stage, precision, more={"tensor_parallel": cut}, model_parallel_size=2)
    # The engine is built without the groups of the ranks, and so would count them as replicas.
    ds_config = {key: value for key, value in config.ds_config.items() if key != "train_batch_size"}
    check_states(two_ranks, config, ds_config)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_and_buckets_of_zero_3_are_counted(precision: str, two_ranks: Ranks) -> None:
    """All parameters of a model this small are whole at once when the backward pass begins."""
    config = decided(3, precision)
    found = estimated(config)
    for moments in two_ranks.run(measure, HIDDEN, LAYERS, config.ds_config):
        assert moments["backward begins"] == pytest.approx(found["device"], rel=0.1)


@pytest.mark.parametrize(
    ("stage", "offload_param", "accumulation"),
    [(1, False, 1), (2, False, 2), (3, False, 1), (3, True, 1)],
)
def test_offloaded_states_are_on_the_host(
    stage: int, offload_param: bool, accumulation: int, two_ranks: Ranks
) -> None:
    """Here the host is the device, so that it is the sum that is seen."""
    offloads = ("offload_optimizer", "offload_param") if offload_param else ("offload_optimizer",)
    zero = {name: {"device": "cpu"} for name in offloads}
    config = decided(stage, accumulation=accumulation, zero=zero)
    found = estimated(config)
    assert found["optimizer_states"] == 0
    for moments in two_ranks.run(measure, HIDDEN, LAYERS, config.ds_config):
        assert max(moments.values()) == pytest.approx(found["device"] + found["host"], rel=0.1)


# ------------------------------------------------------------------------------------------- passes

SAMPLES, MICRO_BATCHES = 4, 6


@pytest.mark.parametrize(
    ("schedule", "chunks", "method"),
    [
        ("gpipe", 1, "uniform"),
        ("1f1b", 1, "parameters"),
        ("interleaved", 2, "uniform"),
        ("zb-h1", 1, "uniform"),
        ("dualpipev", 2, "uniform"),
    ],
)
def test_two_ranks_hold_what_is_estimated(
    two_ranks: Ranks, tmp_path: Path, schedule: str, chunks: int, method: str
) -> None:
    ds_config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    hparams: dict[str, Any] = {
        "global_batch_size": SAMPLES * MICRO_BATCHES,
        "pipe_parallel_size": 2,
        "pipe_schedule": schedule,
        "pipe_chunks": chunks,
        "partition_method": method,
    }
    const = {"deepspeed_config": {"type": "const", "val": ds_config}}
    experiment = {
        "name": "piped",
        "entrypoint": "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train "
        "tests.memory.piped:PipedTrial",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {**hparams, **const, "fit": {"max_length": {"batches": 2}}},
        "searcher": {"name": "single", "metric": "validation_loss"},
    }
    (tmp_path / "piped.yaml").write_text(yaml.safe_dump(experiment))
    schedules = estimate(tmp_path / "piped.yaml", ROOT)["schedules"]
    [row] = [each for each in schedules if each["is_configured"]]
    assert (row["schedule"], row["chunks"]) == (schedule, chunks)
    found = two_ranks.run(train, tmp_path / "run", {**hparams, "deepspeed_config": ds_config})
    # In fp32 a parameter, its gradient and two moments.
    assert [16 * own for _, own in found] == [stage["model_states_bytes"] for stage in row["stages"]]
    held = [stage["activations_bytes"] for stage in row["stages"]]
    assert [most for most, _ in found] == pytest.approx(held, rel=0.1)
