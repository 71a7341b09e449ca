"""DeepSpeed configurations made from Python, and their files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import (
    create_deepspeed_config,
    create_offload_config,
)
from determined_ds.config.deepspeed.files import deepspeed_config_text
from determined_ds.errors import ConfigError
from tests.making import CPU, CUDA, DS_CONFIGS, decide, refusal, refusals

BOTH = {"contiguous_gradients": True, "overlap_comm": True}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
LEFT = {"weight_decay": "auto", "betas": "auto", "eps": "auto"}
RATES = {
    "warmup_min_lr": 0,
    "warmup_max_lr": [0.02, 0.003, 0.003],
    "warmup_num_steps": "auto",
    "warmup_type": "linear",
}
TEMPLATES: dict[str, dict[str, Any]] = {
    "muon": {
        "zero_stage": 1,
        "sections": {
            "optimizer": {
                "type": "Muon",
                "params": {
                    "lr": 0.003,
                    "muon_lr": 0.02,
                    "momentum": 0.95,
                    "weight_decay": "auto",
                    "betas": "auto",
                    "eps": "auto",
                },
            },
            "scheduler": {"type": "WarmupLR", "params": RATES},
            "gradient_clipping": 0.0,
        },
    },
    "pipeline": {"zero_stage": 0},
    "pipeline_zero1": {"zero_stage": 1},
    "tensor_parallel": {"zero_stage": 1, "sections": {"tensor_parallel": {"autotp_size": "auto"}}},
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2, **BOTH},
    "zero3": {"zero_stage": 3, **BOTH, **GATHER},
    "zero3_offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", **GATHER},
    "zeropp": {
        "zero_stage": 3,
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        **BOTH,
    },
}


def made(**arguments: Any) -> dict[str, Any]:
    """Arguments of a wrong type too, which a type checker would refuse."""
    return create_deepspeed_config(**{"zero_stage": 1, **arguments})


# ------------------------------------------------------------------------------------------------------ creating


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_every_template_can_be_made(path: Path) -> None:
    assert deepspeed_config_text(made(**TEMPLATES[path.stem])) == path.read_text()


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ({"precision": "bf16"}, "bf16.enabled", True),
        ({"precision": "fp16"}, "fp16.enabled", True),
        ({"precision": "fp32"}, "bf16.enabled", False),
        ({"learning_rate": 0.1}, "optimizer.params.lr", 0.1),
        ({"learning_rate": 0.1}, "scheduler.params.warmup_max_lr", 0.1),
        ({"betas": (0.9, 0.95)}, "optimizer.params.betas", [0.9, 0.95]),
        ({"optimizer": "Lion"}, "optimizer.params", {"lr": "auto", "betas": "auto", "weight_decay": "auto"}),
        ({"optimizer": "SGD", "zero_stage": 0}, "optimizer.params", {"lr": "auto"}),
        ({"optimizer_params": {"torch_adam": True}}, "optimizer.params.torch_adam", True),
        ({"scheduler": "WarmupDecayLR"}, "scheduler.params.total_num_steps", "auto"),
        ({"scheduler": "WarmupCosineLR", "total_num_steps": 9}, "scheduler.params.total_num_steps", 9),
        ({"scheduler_params": {"warmup_type": "log"}}, "scheduler.params.warmup_type", "log"),
        ({"grad_accum_dtype": "fp32"}, "data_types.grad_accum_dtype", "fp32"),
        ({"reduce_bucket_size": 5e8}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({"sections": {"zero_optimization": {"reduce_scatter": False}}}, "zero_optimization.stage", 1),
        (
            {"sections": {"zero_optimization": {"reduce_scatter": False}}},
            "zero_optimization.reduce_scatter",
            False,
        ),
        ({"activation_checkpointing": {"profile": True}}, "activation_checkpointing.profile", True),
    ],
)
def test_an_argument_is_written_where_deepspeed_reads_it(
    arguments: dict[str, Any], path: str, value: Any
) -> None:
    found: Any = made(**arguments)
    for key in path.split("."):
        found = found[key]
    assert found == value


def test_without_an_optimizer_or_a_schedule() -> None:
    assert not {"optimizer", "scheduler"} & made(optimizer=None, scheduler=None).keys()


def test_what_comes_back_is_ones_own() -> None:
    offload = create_offload_config()
    sections = {"tensorboard": {"enabled": True}}
    first = made(zero_stage=3, offload_param=offload, offload_optimizer=offload, sections=sections)
    first["zero_optimization"]["offload_param"]["device"] = "none"
    first["tensorboard"]["enabled"] = False
    assert offload["device"] == first["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert sections == {"tensorboard": {"enabled": True}}


@pytest.mark.parametrize(
    ("arguments", "key", "said", "fix"),
    [
        ({"zero_stage": 5}, "zero_optimization.stage", "not one of the values", "0, 1, 2, 3"),
        ({"precision": "bf61"}, "precision", "no such precision", "did you mean bf16?"),
        ({"offload_param": "cpu"}, "zero_optimization.offload_param", "ZeRO stage 3, not 1", "to 3"),
        ({"nvme_path": "/x"}, "nvme_path", "nothing is offloaded to nvme", "leave nvme_path out"),
        ({"optimizer": "AdmW"}, "optimizer.type", "no such optimizer", "did you mean AdamW?"),
        ({"optimizer": "Lion", "eps": 1e-8}, "optimizer.params.eps", "unknown key", "betas"),
        (
            {"optimizer_params": {"leraning_rate": 1}},
            "optimizer.params.leraning_rate",
            "unknown key",
            "known here: adam_w_mode",
        ),
        (
            {"scheduler_params": {"warmup_typ": "log"}},
            "scheduler.params.warmup_typ",
            "unknown",
            "'warmup_type'",
        ),
        ({"train_batch_size": 8, "micro_batch_size": 3}, "train_batch_size", "not a multiple of", "6 or 9"),
        ({"sections": {"steps_per_prnt": 1}}, "steps_per_prnt", "unknown key", "'steps_per_print'"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: dict[str, Any], key: str, said: str, fix: str
) -> None:
    found = refusal(lambda: made(**arguments))
    assert found.key == key
    assert said in found.message
    assert fix in found.fix


def test_all_that_is_wrong_is_said_at_once_with_its_argument() -> None:
    wrong = {"precision": "f16", "offload_param": "cpu", "train_batch_size": "8", "optimizer": "AdmW"}
    found = refusals(lambda: made(**wrong))
    assert {problem.origin for problem in found if problem.key != "precision"} == {
        "argument offload_param",
        "argument train_batch_size",
        "argument optimizer",
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        ({"offload_device": "disk"}, "device", "not one of the values"),
        ({"offload_device": "nvme"}, "device", "needs a path"),
        ({"ratio": 1.5}, "ratio", "at most 1"),
        ({"buffer_size": -1}, "buffer_size", "at least 0"),
        (
            {"buffer_size": 1, "ratio": 0.5},
            "buffer_size",
            "of offload_param only, and ratio of offload_optimizer",
        ),
        ({"pin_memory": "yes"}, "pin_memory", "must be true or false"),
    ],
)
def test_an_offload_is_judged_alone(arguments: dict[str, Any], key: str, said: str) -> None:
    found = refusal(lambda: create_offload_config(**arguments))
    assert found.key == key
    assert said in found.message
    assert "zero_optimization" not in found.fix


@pytest.mark.parametrize("value", [3, True, "x", [1], math.nan])
@pytest.mark.parametrize("argument", ["optimizer_params", "scheduler_params", "sections"])
def test_an_argument_that_takes_a_mapping_takes_nothing_else(argument: str, value: Any) -> None:
    found = refusal(lambda: create_deepspeed_config(zero_stage=1, **{argument: value}))
    assert (found.key, found.code) == (argument, "wrong-type")
    assert found.fix.startswith("write a mapping")


@pytest.mark.parametrize("value", [2, 1, ["cpu"]])
def test_an_offload_is_a_device_or_a_mapping(value: Any) -> None:
    found = refusal(lambda: create_deepspeed_config(zero_stage=2, offload_optimizer=value))
    assert found.key == "offload_optimizer"
    assert '"cpu", "nvme"' in found.fix


@pytest.mark.parametrize("precision", [[], {}, 16, None, ["bf16"]])
def test_a_precision_is_one_of_four_words(precision: Any) -> None:
    assert (
        "bf16, fp16, fp32" in refusal(lambda: create_deepspeed_config(zero_stage=1, precision=precision)).fix
    )


def test_an_offload_of_one_kind_is_not_taken_for_the_other() -> None:
    found = refusal(lambda: made(zero_stage=3, offload_optimizer=create_offload_config(max_in_cpu=5)))
    assert (found.key, found.message) == ("zero_optimization.offload_optimizer.max_in_cpu", "unknown key")


# ----------------------------------------------------------------------------------------- by other names


@pytest.mark.parametrize(
    ("others", "real"),
    [
        ({"stage": 2}, {"zero_stage": 2}),
        ({"zero_stage": 2, "optimizer_offload": "cpu"}, {"zero_stage": 2, "offload_optimizer": "cpu"}),
        ({"zero_stage": 2, "optimizer_offload": True}, {"zero_stage": 2, "offload_optimizer": "cpu"}),
        ({"stage": 1, "lr": 0.1, "grad_clip": 2.0}, {"zero_stage": 1, "learning_rate": 0.1, "gradient_clipping": 2.0}),
        ({"zero_stage": 1, "train_micro_batch_size_per_gpu": 4}, {"zero_stage": 1, "micro_batch_size": 4}),
        ({"zero_stage": 1, "stage": 1}, {"zero_stage": 1}),
        ({"zero_stage": 1, "use_bf16": True}, {"zero_stage": 1, "precision": "bf16"}),
        ({"zero_stage": 1, "fp16": True, "bf16": False}, {"zero_stage": 1, "precision": "fp16"}),
        ({"zero_stage": 1, "bf16": True, "precision": "bf16"}, {"zero_stage": 1, "precision": "bf16"}),
        ({"zero_stage": 1, "bf16": False}, {"zero_stage": 1, "precision": "fp32"}),
        ({"zero_stage": 1, "bf16": False, "precision": "fp16"}, {"zero_stage": 1, "precision": "fp16"}),
        ({"zero_stage": 1, "bf16": False, "fp16": False}, {"zero_stage": 1, "precision": "fp32"}),
        ({"zero_stage": 1, "fp16": False}, {"zero_stage": 1, "precision": "auto"}),
        ({"zero_stage": 1, "bf16": "auto"}, {"zero_stage": 1}),
    ],
)  # fmt: skip
def test_an_argument_by_another_name(others: dict[str, Any], real: dict[str, Any]) -> None:
    assert create_deepspeed_config(**others) == create_deepspeed_config(**real)


@pytest.mark.parametrize(
    ("argument", "stands_for"),
    [
        ({"offload_optimizer": True}, {"offload_optimizer": "cpu"}),
        ({"offload_optimizer": False}, {}),
        ({"offload_param": False}, {}),
        ({"optimizer": False}, {"optimizer": None}),
        ({"scheduler": False}, {"scheduler": None}),
        ({"gradient_clipping": False}, {"gradient_clipping": 0.0}),
        ({"activation_checkpointing": False}, {}),
    ],
)
def test_true_and_false_mean_what_they_say(argument: dict[str, Any], stands_for: dict[str, Any]) -> None:
    assert made(**argument) == made(**stands_for)


@pytest.mark.parametrize(
    ("arguments", "key", "said", "fix"),
    [
        ({"zero_stage": 1, "stage": 2}, "stage", "another name of zero_stage, which is 1", "keep zero_stage only"),
        ({"micro_batch_sizes": 2}, "micro_batch_sizes", "no such argument", "did you mean micro_batch_size?"),
        ({"wandb": {}}, "wandb", "no such argument", "sections={'wandb': ...}"),
        ({"frobnicate": 1}, "frobnicate", "no such argument", "use one of zero_stage"),
        ({"bf16": True, "fp16": True}, "bf16", "together with fp16=True", "keep precision only"),
        ({"bf16": True, "precision": "fp32"}, "bf16", "together with precision='fp32'", "keep precision only"),
        ({"use_fp16": False, "precision": "fp16"}, "use_fp16", "with precision='fp16'", "keep precision only"),
        ({"bf16": {"enabled": True}}, "bf16", "must be True or False, not a mapping", 'precision="bf16"'),
        ({"learning_rate": 0.1, "optimizer_params": {"lr": 0.5}}, "optimizer.params.lr", "is not used", "auto"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_taken_is_refused(
    arguments: dict[str, Any], key: str, said: str, fix: str
) -> None:
    found = refusal(lambda: made(**arguments))
    assert found.key == key
    assert said in found.message
    assert fix in found.fix


def test_an_offload_by_other_names() -> None:
    assert create_offload_config(device="nvme", path="/x") == create_offload_config("nvme", nvme_path="/x")  # type: ignore[call-arg]
    assert refusal(lambda: create_offload_config(buffer_counts=3)).fix == "did you mean buffer_count?"  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------- what DeepSpeed says of it

LOTS = {
    "zero_stage": st.integers(0, 3),
    "train_batch_size": st.sampled_from(["auto", 1, 8, 64]),
    "micro_batch_size": st.sampled_from(["auto", 1, 2, 8]),
    "gradient_accumulation_steps": st.sampled_from(["auto", 1, 4]),
    "precision": st.sampled_from(["auto", "bf16", "fp16", "fp32"]),
    "optimizer": st.sampled_from(["AdamW", "Adam", "Lion", "SGD", "Adagrad", None]),
    "learning_rate": st.sampled_from(["auto", 0.1, 1e-4]),
    "scheduler": st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "StepLR", None]),
    "gradient_clipping": st.sampled_from(["auto", 0.0, 1, 2.5]),
    "offload_optimizer": st.sampled_from([None, "cpu", "nvme", {"device": "cpu", "ratio": 0.5}]),
    "offload_param": st.sampled_from([None, "cpu", "nvme"]),
    "nvme_path": st.sampled_from([None, "/local_nvme"]),
    "zero_hpz_partition_size": st.sampled_from([None, 1, 2]),
    "zero_quantized_weights": st.sampled_from([None, False, True]),
    "overlap_comm": st.sampled_from([None, False, True]),
    "reduce_bucket_size": st.sampled_from([None, 1, 500_000_000]),
    "activation_checkpointing": st.sampled_from([None, {"partition_activations": True}]),
    "grad_accum_dtype": st.sampled_from([None, "fp32"]),
}


@pytest.fixture(scope="module")
def deepspeed_config() -> Iterator[Callable[..., Any]]:
    """``deepspeed_config(mapping, replicas)``: DeepSpeed's own reading of a configuration."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def read(config: dict[str, Any], replicas: int) -> Any:
        return DeepSpeedConfig(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: replicas))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.runtime.config.dist.get_rank", lambda: 0)
        yield read


@given(st.fixed_dictionaries(LOTS))
def test_deepspeed_takes_what_is_made(
    deepspeed_config: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """Either it is refused with a fix, or a run can be made of it and DeepSpeed reads it as meant."""
    try:
        config = made(**arguments)
    except ConfigError:
        refusals(lambda: made(**arguments))
        return
    assert json.loads(deepspeed_config_text(config)) == config
    numbers = [config[key] for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    product = math.prod(number for number in numbers if number != "auto")
    batch = config["train_batch_size"]
    slots = 1 if batch == "auto" or "auto" in numbers else batch // product
    given = {"lr": 0.1, "warmup_num_steps": 3, "fit": {"max_length": {"batches": 5}}}
    given |= {"global_batch_size": product} if batch == "auto" else {}
    resolved = decide(given, config, slots=slots, accelerator=CUDA).ds_config
    read = deepspeed_config(resolved, slots)
    assert read.zero_optimization_stage == arguments["zero_stage"]
    assert read.train_batch_size == resolved["train_batch_size"]
    for what in ("offload_optimizer", "offload_param"):
        section = getattr(read.zero_config, what)
        device = arguments[what] if isinstance(arguments[what], str | None) else arguments[what]["device"]
        assert (section.device if section else None) == device
    assert read.float16_config.enabled == (arguments["precision"] == "fp16")
    assert read.bfloat16_config.enabled == (arguments["precision"] in ("auto", "bf16"))


def test_deepspeed_takes_it_without_reconcile(deepspeed_config: Callable[..., Any]) -> None:
    """Where every "auto" is written out, or is one that DeepSpeed passes over."""
    config = made(
        zero_stage=2,
        train_batch_size=32,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        precision="bf16",
        learning_rate=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        warmup_num_steps=10,
        gradient_clipping=1.0,
        offload_optimizer=create_offload_config(pin_memory=False),
    )
    read = deepspeed_config(config, 4)
    assert read.optimizer_params["betas"] == [0.9, 0.95]
    assert read.zero_config.offload_optimizer.pin_memory is False


def test_on_a_cpu_it_is_filled_as_the_templates_are() -> None:
    hp = {"global_batch_size": 8, "lr": 0.1, "warmup_num_steps": 3}
    resolved = decide(hp, made(), accelerator=CPU).ds_config
    assert resolved["bf16"]["enabled"] is False
    assert "auto" not in json.dumps(resolved)
