"""transformers and this library fill the "auto" of a DeepSpeed JSON with the same values, whoever states them."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import leaf_paths
from determined_ds.documents.document import Document, get_path
from determined_ds.errors import ConfigError
from determined_ds.transformers.filling import BUCKETS, FIRST, Filled, Given, fill
from determined_ds.transformers.hf_arguments import TrainingArguments, defaults_of, filled_otherwise

CPU = Accelerator(name="cpu", num_devices=8, bf16=False, fp16=False)
GPU = Accelerator(name="cuda", num_devices=8, bf16=True, fp16=True)
DEFAULTS = defaults_of(TrainingArguments)
HIDDEN_SIZE = 64
STEPS_IN_EPOCH = 25
# What transformers alone fills otherwise; a run names it in a warning.
OTHERWISE = {FIRST, ("bf16", "enabled"), ("fp16", "enabled")}


def filled(
    hyperparameters: dict[str, Any],
    ds: dict[str, Any],
    stated: dict[str, Any],
    *,
    slots: int = 2,
    accelerator: Accelerator = CPU,
) -> Filled:
    return fill(
        Given(values={**DEFAULTS, **stated}, stated={name: f"TrainingArguments.{name}" for name in stated}),
        Document(name="const.yaml", data=hyperparameters, prefix="hyperparameters"),
        Document(name="ds.json", data=ds),
        slots=slots,
        accelerator=accelerator,
    )


def codes(error: ConfigError) -> dict[str, str]:
    return {problem.key: problem.code for problem in error.problems}


def filled_by_transformers(found: Filled, stated: dict[str, Any], *, slots: int = 2) -> dict[str, Any]:
    """What DeepSpeed is given in the end; transformers finds no mismatch."""
    config = HfTrainerDeepSpeedConfig(copy.deepcopy(found.ds_config))
    args = arguments(found, stated, slots=slots)
    config.trainer_config_process(args)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN_SIZE))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * STEPS_IN_EPOCH)
    config.trainer_config_finalize(args, model, steps)
    assert config.mismatches == []
    return config.config


def arguments(found: Filled, stated: dict[str, Any], *, slots: int = 2) -> Any:
    values = {**DEFAULTS, **stated, **found.fields, "world_size": slots, "save_on_each_node": False}
    args = SimpleNamespace(**values)
    args.get_warmup_steps = lambda steps: TrainingArguments.get_warmup_steps(args, steps)
    return args


# --------------------------------------------------------------------------------------------- the property

RATES, BATCHES = st.sampled_from([1e-4, 3e-3, 0.5]), st.sampled_from([1, 2, 4, 8, 16])
AUTO = st.just("auto")


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with any of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


OPTIMIZERS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["AdamW", "Adam"]),
        "params": some(
            lr=AUTO | RATES,
            betas=AUTO | st.just([0.9, 0.95]),
            eps=AUTO | st.just(1e-6),
            weight_decay=AUTO | st.just(0.1),
        ),
    }
)
SCHEDULERS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]),
        "params": some(
            warmup_min_lr=AUTO | st.just(0.0),
            warmup_max_lr=AUTO | RATES,
            warmup_num_steps=AUTO | st.just(5),
            total_num_steps=AUTO | st.just(100),
        ),
    }
)
JSONS = st.fixed_dictionaries(
    {
        "zero_optimization": st.fixed_dictionaries(
            {"stage": st.sampled_from([0, 1, 2, 3])}, optional={path[-1]: AUTO for path in BUCKETS}
        )
    },
    optional={
        "train_batch_size": AUTO | BATCHES,
        "train_micro_batch_size_per_gpu": AUTO | BATCHES,
        "gradient_accumulation_steps": AUTO | BATCHES,
        "gradient_clipping": AUTO | st.just(0.5),
        "optimizer": OPTIMIZERS,
        "scheduler": SCHEDULERS,
        "bf16": st.fixed_dictionaries({"enabled": AUTO | st.booleans()}),
        "fp16": st.fixed_dictionaries({"enabled": AUTO}),
    },
)
HYPERPARAMETERS = some(
    global_batch_size=BATCHES,
    micro_batch_size=BATCHES,
    learning_rate=RATES,
    weight_decay=st.just(0.01),
    betas=st.just([0.8, 0.9]),
    adam_epsilon=st.just(1e-7),
    warmup_num_steps=st.sampled_from([1, 7]),
    gradient_clipping=st.just(2.0),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    fit=st.sampled_from([{"max_length": {"batches": 50}}, {"max_length": {"epochs": 2}}]),
)
STATED = some(
    per_device_train_batch_size=BATCHES,
    gradient_accumulation_steps=BATCHES,
    learning_rate=RATES,
    weight_decay=st.just(0.01),
    adam_beta1=st.just(0.7),
    adam_epsilon=st.just(1e-7),
    max_grad_norm=st.sampled_from([2.0, 0.5]),
    warmup_steps=st.sampled_from([1, 7, 0.1]),
    max_steps=st.just(50),
    num_train_epochs=st.sampled_from([1.0, 1.5]),
    bf16=st.booleans(),
)


@given(
    ds=JSONS,
    hyperparameters=HYPERPARAMETERS,
    stated=STATED,
    slots=st.sampled_from([1, 2, 4]),
    accelerator=st.sampled_from([CPU, GPU]),
)
def test_both_fill_the_same_or_the_point_is_refused(
    ds: dict[str, Any],
    hyperparameters: dict[str, Any],
    stated: dict[str, Any],
    slots: int,
    accelerator: Accelerator,
) -> None:
    found, refused = None, []
    try:
        found = filled(hyperparameters, ds, stated, slots=slots, accelerator=accelerator)
    except ConfigError as error:
        refused = error.problems
    assert all(problem.key and problem.fix for problem in refused)
    if found is None:
        return
    # Only with the data is a length in epochs known in batches, and compared by transformers.
    schedule = (found.ds_config.get("scheduler") or {}).get("params") or {}
    if found.fields.get("max_steps", -1) == -1 and schedule.get("total_num_steps") == 100:
        with pytest.raises(ValueError, match="total_num_steps=100 vs"):
            filled_by_transformers(found, stated, slots=slots)
        return
    final = filled_by_transformers(found, stated, slots=slots)
    for path in leaf_paths(final):
        value, ours = get_path(final, path), get_path(found.ds_config, path)
        assert value != "auto", path
        assert ours in (value, "auto"), path
        if ours != "auto":
            assert found.resolved.ds.get(path) == value, path
    args = arguments(found, stated, slots=slots)
    for name, value in stated.items():  # nothing that is stated is lost
        assert getattr(args, name) == value or (name == "warmup_steps" and value < 1), name
    named = {tuple(problem.key.split(".")) for problem in filled_otherwise(args, found.resolved)}
    assert named <= OTHERWISE


# --------------------------------------------------------------------------------------------- by example


def test_hyperparameters_become_arguments() -> None:
    hyperparameters = {
        "global_batch_size": 32,
        "learning_rate": 0.003,
        "fit": {
            "max_length": {"batches": 40},
            "validation_period": {"batches": 10},
            "checkpoint_period": {"epochs": 1},
            "save_total_limit": 2,
        },
    }
    ds = {"gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    fields = filled(hyperparameters, ds, {"weight_decay": 0.1}).fields
    expected = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.003,
        "weight_decay": 0.1,
        "max_steps": 40,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "use_cpu": True,
    }
    assert fields.items() >= expected.items()


def test_arguments_alone_decide_what_nothing_else_states() -> None:
    ds = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    found = filled(
        {}, ds, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": 7}
    )
    assert found.resolved.batch.global_batch_size == 2 * 4 * 3
    assert found.ds_config["optimizer"]["params"]["lr"] == DEFAULTS["learning_rate"]


def test_a_share_of_warmup_steps_is_counted_or_left_to_transformers() -> None:
    section = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    by_batches = filled(
        {"fit": {"max_length": {"batches": 50}}}, {"scheduler": section}, {"warmup_steps": 0.1}
    )
    assert by_batches.ds_config["scheduler"]["params"]["warmup_num_steps"] == 5
    by_epochs = filled({"fit": {"max_length": {"epochs": 2}}}, {"scheduler": section}, {"warmup_steps": 0.1})
    params = filled_by_transformers(by_epochs, {"warmup_steps": 0.1})["scheduler"]["params"]
    assert (params["warmup_num_steps"], params["total_num_steps"]) == (5, 50)


@pytest.mark.parametrize(
    ("hyperparameters", "ds", "stated", "expected"),
    [
        (
            {"learning_rate": 0.1},
            {},
            {"learning_rate": 0.2},
            {"TrainingArguments.learning_rate": "stated-twice"},
        ),
        (
            {"fit": {"max_length": {"batches": 5}}},
            {},
            {"max_steps": 6},
            {"TrainingArguments.max_steps": "stated-twice"},
        ),
        (
            {"global_batch_size": 8},
            {},
            {"per_device_train_batch_size": 3},
            {"hyperparameters.global_batch_size": "batch"},
        ),
        (
            {},
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
            {"lr_scheduler_type": "cosine"},
            {"TrainingArguments.lr_scheduler_type": "stated-twice"},
        ),
        ({}, {"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, {"TrainingArguments.optim": "stated-twice"}),
        ({"pipe_parallel_size": 2}, {}, {}, {"hyperparameters.pipe_parallel_size": "hf-replicas"}),
        ({"sdpa_kernel": "math"}, {}, {}, {"hyperparameters.sdpa_kernel": "hf-kernel"}),
        (
            {"fit": {"max_length": {"batches": 5}, "validation_period": {"epochs": 2}}},
            {},
            {},
            {"hyperparameters.fit.validation_period": "hf-period"},
        ),
        (
            {"fit": {"max_length": {"batches": 5}, "checkpoint_period": {"minutes": 15}}},
            {},
            {},
            {"hyperparameters.fit.checkpoint_period": "hf-period"},
        ),
        (
            {"fit": {"max_length": {"batches": 5}, "asynchronous_checkpoints": True}},
            {},
            {},
            {"hyperparameters.fit.asynchronous_checkpoints": "hf-asynchronous"},
        ),
        (
            {"fit": {"max_length": {"batches": 5}, "checkpoint_period": {"batches": [2, 4]}}},
            {},
            {},
            {"hyperparameters.fit.checkpoint_period": "hf-period"},
        ),
    ],
)
def test_contradictions_are_refused_and_both_places_named(
    hyperparameters: dict[str, Any], ds: dict[str, Any], stated: dict[str, Any], expected: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        filled(hyperparameters, ds, stated)
    assert codes(caught.value).items() >= expected.items()
    assert all(problem.fix for problem in caught.value.problems)
