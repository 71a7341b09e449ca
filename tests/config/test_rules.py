"""The compatibility table: each rule by a configuration that breaks it, and a neighbour that does not."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.normalized import TORCH_TYPES
from determined_ds.config.facts import ZERO_OPTIMIZERS
from determined_ds.config.rules import RULES, Rule
from determined_ds.documents.document import KeyPath, dotted
from determined_ds.errors import ConfigError, Problem
from tests.making import CPU, CUDA, decide
from tests.ranks import Ranks

ZERO = "zero_optimization"
FEW = Accelerator(name="cuda", num_devices=2, bf16=True, fp16=True)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A configuration; the rest is two replicas and a batch that divides."""

    ds: dict[str, Any] = field(default_factory=dict)
    pipe: int = 1
    model: int = 1
    slots: int = 2
    accelerator: Accelerator = CUDA
    machines: int = 1


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {ZERO: {"stage": stage, **settings}}


CPU_OFFLOAD, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
MASTER = {"enabled": True, "bf16_master_weights_and_grads": True}
CONTIGUOUS = {"contiguous_memory_optimization": True}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}

# (code, key) of a rule -> (what breaks it, its neighbour that does not).
CASES: dict[tuple[str, KeyPath], tuple[Setup, Setup]] = {
    ("pipeline-zero-stage", (ZERO, "stage")): (Setup(ds=zero(2), pipe=2), Setup(ds=zero(1), pipe=2)),
    ("offload-param-stage", (ZERO, "offload_param")): (
        Setup(ds=zero(2, offload_param=CPU_OFFLOAD)),
        Setup(ds=zero(3, offload_param=CPU_OFFLOAD)),
    ),
    ("offload-optimizer-stage", (ZERO, "offload_optimizer")): (
        Setup(ds=zero(0, offload_optimizer=CPU_OFFLOAD)),
        Setup(ds=zero(1, offload_optimizer=CPU_OFFLOAD)),
    ),
    ("offload-nvme-stage", (ZERO, "offload_optimizer", "device")): (
        Setup(ds=zero(2, offload_optimizer=NVME)),
        Setup(ds=zero(3, offload_optimizer=NVME)),
    ),
    ("offload-nvme-path", (ZERO, "offload_optimizer", "device")): (
        Setup(ds=zero(3, offload_optimizer={"device": "nvme"})),
        Setup(ds=zero(3, offload_optimizer=NVME)),
    ),
    ("offload-nvme-path", (ZERO, "offload_param", "device")): (
        Setup(ds=zero(3, offload_param={"device": "nvme"})),
        Setup(ds=zero(3, offload_param=NVME)),
    ),
    ("fp16-and-bf16", ("fp16", "enabled")): (
        Setup(ds={**FP16, "bf16": {"enabled": True}}),
        Setup(ds={**FP16, "bf16": {"enabled": False}}),
    ),
    ("fp16-unsupported", ("fp16", "enabled")): (Setup(ds=FP16, accelerator=CPU), Setup(ds=FP16)),
    ("pipeline-fp16-stage", ("fp16", "enabled")): (
        Setup(ds=FP16, pipe=2),
        Setup(ds={**FP16, **zero(1)}, pipe=2),
    ),
    ("zeropp-hpz-stage", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds=zero(2, zero_hpz_partition_size=2)),
        Setup(ds=zero(2, zero_hpz_partition_size=1)),
    ),
    ("zeropp-hpz-size", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds=zero(3, zero_hpz_partition_size=3), slots=4),
        Setup(ds=zero(3, zero_hpz_partition_size=8), slots=4),  # more than there are: all of them
    ),
    **{
        (f"zeropp-quantized-{what}", (ZERO, key)): (broken, Setup(ds=zero(3, **{key: True})))
        for key in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
        for what, broken in (
            ("stage", Setup(ds=zero(2, **{key: True}))),
            ("cuda", Setup(ds=zero(3, **{key: True}), accelerator=CPU)),
        )
    },
    ("zeropp-gradients-machines", (ZERO, "zero_quantized_gradients")): (
        Setup(ds={**BF16, **zero(3, zero_quantized_gradients=True)}, machines=2),
        Setup(
            ds={**BF16, "communication_data_type": "fp16", **zero(3, zero_quantized_gradients=True)},
            machines=2,
        ),
    ),
    ("onebit", ("optimizer", "type")): (
        Setup(ds={"optimizer": {"type": "OneBitAdam"}}),
        Setup(ds={"optimizer": {"type": "AdamW"}}),
    ),
    ("optimizer-nvcc", ("optimizer", "type")): (
        Setup(ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}}}),
        Setup(ds={"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}),
    ),
    ("master-weights-stage", ("fp16", "fp16_master_weights_and_grads")): (
        Setup(ds={"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}),
        Setup(ds={"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **zero(1)}),
    ),
    ("master-weights-stage", ("bf16", "bf16_master_weights_and_grads")): (
        Setup(ds={"bf16": MASTER}),
        Setup(ds={"bf16": MASTER, **zero(1)}),
    ),
    ("bf16-optimizer-states", ("bf16", "bf16_optimizer_states")): (
        Setup(ds={"bf16": {"enabled": True, "bf16_optimizer_states": True}, **zero(1)}),
        Setup(ds={"bf16": {**MASTER, "bf16_optimizer_states": True}, **zero(1)}),
    ),
    ("allreduce-sum", ("gradient_allreduce_op",)): (
        Setup(ds={"gradient_allreduce_op": "SUM", **zero(3)}),
        Setup(ds={"gradient_allreduce_op": "SUM", **zero(2)}),
    ),
    ("compute-grad-norm-stage", (ZERO, "compute_grad_norm")): (
        Setup(ds=zero(3, compute_grad_norm=False)),
        Setup(ds=zero(2, compute_grad_norm=False)),
    ),
    ("offload-ratio-stage", (ZERO, "offload_optimizer", "ratio")): (
        Setup(ds=zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5})),
        Setup(ds=zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})),
    ),
    ("loss-scale", ("fp16", "loss_scale")): (
        Setup(ds={"fp16": {"enabled": True, "min_loss_scale": 0}}),
        Setup(ds={"fp16": {"enabled": True, "min_loss_scale": 0, "loss_scale": 128}}),
    ),
    ("more-ranks-than-devices", ("slots_per_trial",)): (
        Setup(slots=4, accelerator=FEW),
        Setup(slots=2, accelerator=FEW),
    ),
    ("pipeline-bubble", ("gradient_accumulation_steps",)): (
        Setup(ds={"gradient_accumulation_steps": 1}, pipe=2),
        Setup(ds={"gradient_accumulation_steps": 2}, pipe=2),
    ),
    ("pipeline-bf16-grad-dtype", ("data_types", "grad_accum_dtype")): (
        Setup(ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, pipe=2),
        Setup(
            ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "torch.float32"}},
            pipe=2,
        ),
    ),
    ("cpu-checkpointing", ("activation_checkpointing", "cpu_checkpointing")): (
        Setup(ds={"activation_checkpointing": {"cpu_checkpointing": True}}, accelerator=CPU),
        Setup(ds={"activation_checkpointing": {"cpu_checkpointing": True}}, accelerator=CUDA),
    ),
    ("contiguous-checkpoints", ("activation_checkpointing", "contiguous_memory_optimization")): (
        Setup(ds={"activation_checkpointing": CONTIGUOUS}),
        Setup(
            ds={
                "activation_checkpointing": {
                    **CONTIGUOUS,
                    "number_checkpoints": 2,
                    "partition_activations": True,
                }
            }
        ),
    ),
    ("zero-untested-optimizer", ("optimizer", "type")): (
        Setup(ds={**zero(1), **SGD}),
        Setup(ds={**zero(1), **SGD, "zero_allow_untested_optimizer": True}),
    ),
    ("grad-accum-mix", ("data_types", "grad_accum_dtype")): (
        Setup(ds={"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
        Setup(ds={**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ),
    ("model-parallel-degree", ("sequence_parallel_size",)): (
        Setup(ds={"sequence_parallel_size": 2}),
        Setup(ds={"sequence_parallel_size": 2}, model=2),
    ),
    ("model-parallel-degree", ("tensor_parallel", "autotp_size")): (
        Setup(ds={"tensor_parallel": {"autotp_size": 2}}),
        Setup(ds={"tensor_parallel": {"autotp_size": 2}}, model=2),
    ),
    ("pipeline-unheeded", ("flops_profiler", "enabled")): (
        Setup(ds={"flops_profiler": {"enabled": True}}, pipe=2),
        Setup(ds={"flops_profiler": {"enabled": True}}),
    ),
    ("pipeline-unheeded", ("hybrid_engine", "enabled")): (
        Setup(ds={"hybrid_engine": {"enabled": True}}, pipe=2),
        Setup(ds={"hybrid_engine": {"enabled": True}}),
    ),
    ("deepcompile-cuda", ("compile", "deepcompile")): (
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}, accelerator=CPU),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
    ("deepcompile-stage", ("compile", "deepcompile")): (
        Setup(ds={**zero(0), "compile": {"deepcompile": True}}),
        Setup(ds={**zero(2), "compile": {"deepcompile": True}}),
    ),
    ("memory-breakdown-peak", ("memory_breakdown",)): (
        Setup(ds={"memory_breakdown": True}, accelerator=CUDA),
        Setup(ds={"memory_breakdown": True}, accelerator=CPU),
    ),
}


def told(setup: Setup) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings."""
    hp = {
        "global_batch_size": 24,
        "pipe_parallel_size": setup.pipe,
        "model_parallel_size": setup.model,
    }
    try:
        resolved = decide(
            hp, setup.ds, slots=setup.slots, accelerator=setup.accelerator, machines=setup.machines
        )
    except ConfigError as error:
        return list(error.problems), []
    return [], list(resolved.warnings)


def by_code(problems: list[Problem], rule: Rule) -> list[Problem]:
    return [found for found in problems if (found.code, found.key) == (rule.code, dotted(rule.key))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}:{dotted(rule.key)}")
class TestEachRule:
    def test_is_broken(self, rule: Rule) -> None:
        broken, _ = CASES[rule.code, rule.key]
        problems, warnings = told(broken)
        (found,) = by_code(warnings if rule.warning else problems, rule)
        assert found.fix
        assert not re.search(r"[{}]", found.message)
        assert bool(problems) != rule.warning

    def test_is_kept_by_the_neighbour(self, rule: Rule) -> None:
        problems, warnings = told(CASES[rule.code, rule.key][1])
        assert problems == []
        assert by_code(warnings, rule) == []

    def test_has_a_reason_a_fix_and_a_source(self, rule: Rule) -> None:
        assert rule.message
        assert rule.fix
        assert rule.source

    def test_names_a_source_that_there_is(self, rule: Rule) -> None:
        """A file of the installed DeepSpeed, and a symbol in it, where the source is DeepSpeed."""
        named = re.match(r"deepspeed [\d.]+ ([\w/]+\.py)(?: ([\w.]+))?", rule.source)
        assert named or "deepspeed" not in rule.source
        if named:
            package = importlib.util.find_spec("deepspeed")
            assert package is not None
            assert package.origin is not None
            text = (Path(package.origin).parent / named.group(1)).read_text()
            for symbol in (named.group(2) or "").split("."):
                assert symbol in text


def test_every_case_is_of_a_rule() -> None:
    assert set(CASES) == {(rule.code, rule.key) for rule in RULES}


def test_every_broken_rule_is_told_at_once() -> None:
    ds = {**FP16, **zero(2, offload_param=CPU_OFFLOAD, zero_hpz_partition_size=2)}
    problems, _ = told(Setup(ds=ds, pipe=2, accelerator=CPU))
    assert {found.code for found in problems} == {
        "pipeline-zero-stage",
        "offload-param-stage",
        "fp16-unsupported",
        "zeropp-hpz-stage",
    }


def test_a_warning_stops_nothing() -> None:
    problems, warnings = told(Setup(ds={"gradient_accumulation_steps": 1}, pipe=2))
    assert problems == []
    assert [warning.code for warning in warnings] == ["pipeline-bubble"]
    assert str(warnings[0]) == (
        "gradient_accumulation_steps = 1 (ds.json): 1 micro-batches for 2 pipeline stages: some stages are always"
        " idle\n  fix: use at least 2 micro-batches (4 x 2 keep the bubble under 20 %)"
    )


# ---------------------------------------------------------------------------------------- what DeepSpeed says of them


def configure_checkpoints(section: dict[str, Any]) -> str:
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    config = {"train_batch_size": 1, "activation_checkpointing": section}
    try:
        deepspeed.checkpointing.configure(None, config)
    except AssertionError as error:
        return str(error)
    finally:
        deepspeed.checkpointing._configure_defaults()
    return ""


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        ("number_checkpoints", "number of layers"),
        ("partition_activations", "partitioned activations"),
        ("", ""),
    ],
)
def test_contiguous_checkpoints_fail_in_deepspeed_on_what_the_rule_asks_for(
    one_rank: Ranks, lacking: str, says: str
) -> None:
    section = {**CONTIGUOUS, "number_checkpoints": 2, "partition_activations": True}
    section.pop(lacking, None)
    (said,) = one_rank.run(configure_checkpoints, section)
    assert says in said
    assert bool(said) == bool(lacking)
    problems, _ = told(Setup(ds={"activation_checkpointing": section}))
    assert [problem.code for problem in problems] == (["contiguous-checkpoints"] if lacking else [])


def test_the_optimizers_of_zero_are_deepspeeds_own() -> None:
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name in TORCH_TYPES["optimizer"] - {"Muon"}:  # which DeepSpeed takes for its own
        taken = getattr(torch.optim, name) in ZERO_SUPPORTED_OPTIMIZERS
        assert taken == (name.lower() in ZERO_OPTIMIZERS), name


def train_with_sgd(ds_config: dict[str, Any]) -> str:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = torch.nn.Linear(2, 1)
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    except AssertionError as error:
        return str(error)
    return ""


def test_an_optimizer_that_zero_refuses_is_refused_before(one_rank: Ranks) -> None:
    allowed = decide(
        {"global_batch_size": 2}, {**zero(1), **SGD, "zero_allow_untested_optimizer": True}, slots=1
    )
    assert one_rank.run(train_with_sgd, allowed.ds_config) == [""]
    refused = {key: value for key, value in allowed.ds_config.items() if "untested" not in key}
    (said,) = one_rank.run(train_with_sgd, refused)
    assert "untested ZeRO Optimizer" in said
    problems, _ = told(Setup(ds={**zero(1), **SGD}))
    assert [problem.code for problem in problems] == ["zero-untested-optimizer"]
