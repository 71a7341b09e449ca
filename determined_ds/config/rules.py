"""The compatibility table: what cannot run together, why, how to fix it, and where that is known from.

A row is a rule. ``breaks`` sees the :class:`Facts` after every "auto" is filled, and says whether the rule is
broken; ``message`` and ``fix`` may name any fact in braces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from determined_ds.config.deepspeed.normalized import ONE_BIT
from determined_ds.config.facts import ZERO, Facts
from determined_ds.documents.document import KeyPath
from determined_ds.errors import NOT_GIVEN, Problem

CONFIG = "deepspeed 0.19.8 runtime/config.py DeepSpeedConfig._do_error_check"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the compatibility table.

    Args:
        code: Short stable name.
        key: The key that is named in the problem; the value and origin are looked up there.
        breaks: True where the rule is broken.
        message: What does not go together; ``{fact}`` is filled from :class:`Facts`.
        fix: What to write instead.
        source: Where upstream the rule comes from.
        warning: True where the run is possible but probably not intended.
    """

    code: str
    key: KeyPath
    breaks: Callable[[Facts], bool]
    message: str
    fix: str
    source: str
    warning: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        code="pipeline-zero-stage",
        key=(ZERO, "stage"),
        breaks=lambda f: f.pipe > 1 and f.zero_stage > 1,
        message="a pipeline (pipe_parallel_size {pipe}) runs with ZeRO stage 0 or 1 only, not {zero_stage}",
        fix="set zero_optimization.stage to 1, or pipe_parallel_size to 1",
        source="deepspeed 0.19.8 runtime/pipe/engine.py PipelineEngine.__init__",
    ),
    Rule(
        code="offload-param-stage",
        key=(ZERO, "offload_param"),
        breaks=lambda f: f.strategy.offload_param is not None and f.zero_stage != 3,
        message="parameters can be offloaded only where they are partitioned: ZeRO stage 3, not {zero_stage}",
        fix="set zero_optimization.stage to 3, or remove offload_param",
        source="deepspeed 0.19.8 runtime/zero/offload_config.py",
    ),
    Rule(
        code="offload-optimizer-stage",
        key=(ZERO, "offload_optimizer"),
        breaks=lambda f: f.strategy.offload_optimizer is not None and f.zero_stage < 1,
        message="the optimizer can be offloaded from ZeRO stage 1 on, not at stage {zero_stage}",
        fix="set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer",
        source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (older texts say 2 and 3)",
    ),
    Rule(
        code="offload-nvme-stage",
        key=(ZERO, "offload_optimizer", "device"),
        breaks=lambda f: f.strategy.offload_optimizer == "nvme" and f.zero_stage != 3,
        message="the optimizer can be offloaded to nvme at ZeRO stage 3 only, not {zero_stage}",
        fix="use device cpu, or ZeRO stage 3",
        source="deepspeed 0.19.8 runtime/zero/stage3.py (only stage 3 has swap_optimizer)",
    ),
    *(
        Rule(
            code="offload-nvme-path",
            key=(ZERO, what, "device"),
            breaks=lambda f, what=what: (  # type: ignore[misc]
                getattr(f.strategy, what) == "nvme" and not f.zero(what).get("nvme_path")
            ),
            message="offload to nvme needs a path to put the files",
            fix=f"add zero_optimization.{what}.nvme_path",
            source="deepspeed 0.19.8 runtime/zero/offload_config.py",
        )
        for what in ("offload_optimizer", "offload_param")
    ),
    Rule(
        code="fp16-and-bf16",
        key=("fp16", "enabled"),
        breaks=lambda f: f.enabled("fp16") and f.enabled("bf16"),
        message="fp16 and bf16 exclude each other, and both are enabled",
        fix="disable one of them",
        source="deepspeed 0.19.8 runtime/config.py DeepSpeedConfig._initialize_params",
    ),
    Rule(
        code="fp16-unsupported",
        key=("fp16", "enabled"),
        breaks=lambda f: f.enabled("fp16") and not f.accelerator.fp16,
        message="this accelerator does not train in fp16",
        fix='set fp16.enabled to "auto" or false, or bf16.enabled to true',
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_sanity_check",
    ),
    Rule(
        code="pipeline-fp16-stage",
        key=("fp16", "enabled"),
        breaks=lambda f: f.pipe > 1 and f.enabled("fp16") and f.zero_stage == 0,
        message="without ZeRO a pipeline does not scale its fp16 loss, and divides the gradients by the scale",
        fix="set zero_optimization.stage to 1, or pipe_parallel_size to 1, or use bf16",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine.backward; runtime/fp16/unfused_optimizer.py",
    ),
    Rule(
        code="zeropp-hpz-stage",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.hpz > 1 and f.zero_stage != 3,
        message="ZeRO++ secondary partitions need ZeRO stage 3, not {zero_stage}",
        fix="set zero_optimization.stage to 3, or zero_hpz_partition_size to 1",
        source="deepspeed 0.19.8 runtime/zero/stage3.py; ZeRO++, arXiv 2306.10209",
    ),
    Rule(
        code="zeropp-hpz-size",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.hpz > 1 and f.slots % min(f.hpz, f.slots) != 0,
        message="{slots} slots cannot be split into secondary partitions of {hpz}",
        fix="use a zero_hpz_partition_size that divides the slots (usually the GPUs of one node)",
        source="deepspeed 0.19.8 utils/groups.py _create_zero_param_parallel_group",
    ),
    *(
        rule
        for key in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
        for rule in (
            Rule(
                code="zeropp-quantized-stage",
                key=(ZERO, key),
                breaks=lambda f, key=key: bool(f.zero(key)) and f.zero_stage != 3,  # type: ignore[misc]
                message="ZeRO++ quantization needs ZeRO stage 3, not {zero_stage}",
                fix=f"set zero_optimization.stage to 3, or {key} to false",
                source="deepspeed 0.19.8 runtime/zero/stage3.py; ZeRO++, arXiv 2306.10209",
            ),
            Rule(
                code="zeropp-quantized-cuda",
                key=(ZERO, key),
                breaks=lambda f, key=key: bool(f.zero(key)) and f.accelerator.name != "cuda",  # type: ignore[misc]
                message="ZeRO++ quantization runs in CUDA kernels, and there is no CUDA device",
                fix=f"run it on GPUs, or set {key} to false",
                source="deepspeed 0.19.8 ops/op_builder/cpu/no_impl.py NotImplementedBuilder",
            ),
        )
    ),
    Rule(
        code="zeropp-gradients-machines",
        key=(ZERO, "zero_quantized_gradients"),
        breaks=lambda f: (
            bool(f.zero("zero_quantized_gradients")) and f.machines > 1 and f.communication_dtype != "fp16"
        ),
        message="on {machines} machines the kernel reads gradients as fp16, and these are {communication_dtype}:"
        " it would train on other numbers",
        fix='add "communication_data_type": "fp16", or set zero_quantized_gradients to false',
        source="deepspeed 0.19.8 runtime/comm/coalesced_collectives.py all_to_all_quant_reduce",
    ),
    Rule(
        code="onebit",
        key=("optimizer", "type"),
        breaks=lambda f: f.optimizer_type.lower() in ONE_BIT,
        message="1-bit optimizers are gone from DeepSpeed, and their compression backends with them",
        fix="use AdamW",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer",
    ),
    Rule(
        code="zero-untested-optimizer",
        key=("optimizer", "type"),
        breaks=lambda f: (
            f.zero_stage > 0 and not f.zero_takes_optimizer and f.optimizer_type.lower() not in ONE_BIT
        ),
        message="ZeRO stage {zero_stage} takes Adam, AdamW, Adagrad, Lion and Muon, and refuses {optimizer_type}",
        fix='use AdamW, set zero_optimization.stage to 0, or add "zero_allow_untested_optimizer": true',
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check",
    ),
    Rule(
        code="optimizer-nvcc",
        key=("optimizer", "type"),
        breaks=lambda f: f.compiles_optimizer,
        message="DeepSpeed's own {optimizer_type} is compiled by nvcc before the first step, on every machine",
        fix="use an image with the CUDA toolkit, or AdamW with torch_adam and fused left out, which takes torch's",
        source="deepspeed 0.19.8 ops/adam/fused_adam.py, ops/lion/fused_lion.py, ops/lamb/fused_lamb.py",
        warning=True,
    ),
    *(
        Rule(
            code="master-weights-stage",
            key=(section, f"{section}_master_weights_and_grads"),
            breaks=lambda f, section=section: (  # type: ignore[misc]
                bool(f.ds.get((section, f"{section}_master_weights_and_grads"))) and f.zero_stage < 1
            ),
            message="16-bit master weights need ZeRO stage 1, 2 or 3, not {zero_stage}",
            fix=f"set zero_optimization.stage to 1, or remove {section}_master_weights_and_grads",
            source=CONFIG,
        )
        for section in ("fp16", "bf16")
    ),
    Rule(
        code="bf16-optimizer-states",
        key=("bf16", "bf16_optimizer_states"),
        breaks=lambda f: (
            bool(f.ds.get(("bf16", "bf16_optimizer_states")))
            and not (f.zero_stage and f.ds.get(("bf16", "bf16_master_weights_and_grads")))
        ),
        message="bf16 optimizer states need bf16_master_weights_and_grads, and ZeRO stage 1, 2 or 3",
        fix="enable bf16.bf16_master_weights_and_grads and ZeRO, or remove bf16_optimizer_states",
        source=CONFIG,
    ),
    Rule(
        code="allreduce-sum",
        key=("gradient_allreduce_op",),
        breaks=lambda f: (
            str(f.ds.get(("gradient_allreduce_op",))).lower() == "sum"
            and (f.zero_stage == 3 or bool(f.zero("zenflow")) or f.strategy.deepcompile)
        ),
        message="gradients cannot be summed with ZeRO stage 3, ZenFlow or DeepCompile",
        fix='set gradient_allreduce_op to "mean"',
        source=CONFIG,
    ),
    Rule(
        code="compute-grad-norm-stage",
        key=(ZERO, "compute_grad_norm"),
        breaks=lambda f: f.zero("compute_grad_norm") is False and f.zero_stage not in (1, 2),
        message="the gradient's norm can be left out at ZeRO stage 1 or 2 only, not {zero_stage}",
        fix="set zero_optimization.stage to 1 or 2, or remove compute_grad_norm",
        source="deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig.compute_grad_norm_valid",
    ),
    Rule(
        code="offload-ratio-stage",
        key=(ZERO, "offload_optimizer", "ratio"),
        breaks=lambda f: f.ds.get((ZERO, "offload_optimizer", "ratio"), 1) < 1 and f.zero_stage != 3,
        message="the optimizer can be offloaded in part at ZeRO stage 3 only, not {zero_stage}",
        fix="set offload_optimizer.ratio to 1, or zero_optimization.stage to 3",
        source="deepspeed 0.19.8 runtime/zero/config.py DeepSpeedZeroConfig.offload_ratio_check",
    ),
    Rule(
        code="loss-scale",
        key=("fp16", "loss_scale"),
        breaks=lambda f: (
            f.enabled("fp16")
            and not f.ds.get(("fp16", "loss_scale"), 0)
            and min(f.ds.get(("fp16", key), 1) for key in ("loss_scale_window", "min_loss_scale")) <= 0
        ),
        message="dynamic loss scaling needs loss_scale_window and min_loss_scale above 0",
        fix="write values above 0, or a fixed loss_scale",
        source="deepspeed 0.19.8 runtime/precision_config.py DeepSpeedFP16Config",
    ),
    Rule(
        code="more-ranks-than-devices",
        key=("slots_per_trial",),
        breaks=lambda f: f.slots > f.max_ranks,
        message="{slots} slots on a machine that carries {max_ranks} ranks ({num_devices} devices)",
        fix="use --slots {max_ranks} or fewer",
        source="one rank a GPU; at most four ranks a CPU core",
    ),
    Rule(
        code="pipeline-bubble",
        key=("gradient_accumulation_steps",),
        breaks=lambda f: f.pipe > 1 and f.micro_batches < f.pipe,
        message="{micro_batches} micro-batches for {pipe} pipeline stages: some stages are always idle",
        fix="use at least {pipe} micro-batches (4 x {pipe} keep the bubble under 20 %)",
        source="GPipe, arXiv 1811.06965: the bubble is (p-1)/(m+p-1)",
        warning=True,
    ),
    Rule(
        code="cpu-checkpointing",
        key=("activation_checkpointing", "cpu_checkpointing"),
        breaks=lambda f: (
            bool(f.ds.get(("activation_checkpointing", "cpu_checkpointing"))) and f.accelerator.name == "cpu"
        ),
        message="activations are on the CPU already, and DeepSpeed fails on moving them there",
        fix="remove cpu_checkpointing, or run it on GPUs",
        source="deepspeed 0.19.8 runtime/activation_checkpointing/checkpointing.py CheckpointFunction.forward",
    ),
    Rule(
        code="contiguous-checkpoints",
        key=("activation_checkpointing", "contiguous_memory_optimization"),
        breaks=lambda f: (
            bool(f.checkpointing("contiguous_memory_optimization"))
            and not (f.checkpointing("number_checkpoints") and f.checkpointing("partition_activations"))
        ),
        message="needs number_checkpoints, the number of checkpointed layers, and partition_activations",
        fix="add number_checkpoints: N and partition_activations: true, or remove contiguous_memory_optimization",
        source="deepspeed 0.19.8 runtime/activation_checkpointing/checkpointing.py configure",
    ),
    Rule(
        code="grad-accum-mix",
        key=("data_types", "grad_accum_dtype"),
        breaks=lambda f: f.zero_stage == 0 and f.strategy.grad_dtype != f.strategy.precision,
        message="without ZeRO, gradients are accumulated in what the model computes in, {strategy.precision}",
        fix="remove data_types.grad_accum_dtype, or set zero_optimization.stage to 1",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check",
    ),
    Rule(
        code="pipeline-bf16-grad-dtype",
        key=("data_types", "grad_accum_dtype"),
        breaks=lambda f: (
            f.pipe > 1 and f.enabled("bf16") and f.zero_stage == 1 and f.strategy.grad_dtype != "fp32"
        ),
        message="bf16 pipelines accumulate gradients in bf16 and are reported to hang with ZeRO 1",
        fix='add "data_types": {{"grad_accum_dtype": "fp32"}}',
        source="deepspeed 0.19.8 runtime/pipe/engine.py; upstream issues",
        warning=True,
    ),
    *(
        Rule(
            code="model-parallel-degree",
            key=key,
            breaks=lambda f, key=key: (f.ds.get(key) or 1) not in (1, f.topology.model_parallel_size),  # type: ignore[misc]
            message="ranks would share a replica that hyperparameters.model_parallel_size"
            " = {topology.model_parallel_size} counts as several, each with its own data",
            fix="set hyperparameters.model_parallel_size to the same, and wrap the trial's mpu; or remove it",
            source="deepspeed 0.19.8 __init__.py initialize; runtime/config.py DeepSpeedConfig.__init__",
        )
        for key in (("sequence_parallel_size",), ("tensor_parallel", "autotp_size"))
    ),
    *(
        Rule(
            code="pipeline-unheeded",
            key=(section, "enabled"),
            breaks=lambda f, section=section: f.pipe > 1 and f.enabled(section),  # type: ignore[misc]
            message="is ignored by a pipeline's engine",
            fix="remove it, or set pipe_parallel_size to 1",
            source="deepspeed 0.19.8 runtime/pipe/engine.py PipelineEngine.train_batch; __init__.py initialize",
            warning=True,
        )
        for section in ("flops_profiler", "hybrid_engine")
    ),
    Rule(
        code="deepcompile-cuda",
        key=("compile", "deepcompile"),
        breaks=lambda f: f.strategy.deepcompile and f.accelerator.name != "cuda",
        message="DeepCompile is written for CUDA, and there is no CUDA device",
        fix="run it on GPUs, or write hyperparameters.torch_compile: true instead",
        source="deepspeed 0.19.8 compile/util.py is_deepcompile_supported",
    ),
    Rule(
        code="deepcompile-stage",
        key=("compile", "deepcompile"),
        breaks=lambda f: f.strategy.deepcompile and f.zero_stage == 0,
        message="is ignored without ZeRO: torch's own compiler is used",
        fix="set zero_optimization.stage to 1, 2 or 3, or write hyperparameters.torch_compile: true instead",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine.get_deepcompile_backend",
        warning=True,
    ),
    Rule(
        code="memory-breakdown-peak",
        key=("memory_breakdown",),
        breaks=lambda f: (
            bool(f.ds.get(("memory_breakdown",)))
            and f.accelerator.name == "cuda"
            and "memory_breakdown" not in f.switched_on  # which is read, and not printed
        ),
        message="resets the peak of the device's memory as it prints: peak_memory_gib is that since the last print",
        fix="remove it where that metric matters",
        source="deepspeed 0.19.8 runtime/utils.py see_memory_usage",
        warning=True,
    ),
)


def broken_rules(facts: Facts, *, slots_origin: str = "") -> Iterator[tuple[Rule, Problem]]:
    """Every rule of the table that the facts break, with its problem filled in."""
    for rule in RULES:
        if rule.breaks(facts):
            on_slots = rule.key == ("slots_per_trial",)
            problem = Problem(
                key=facts.ds.key(rule.key),
                value=facts.slots if on_slots else facts.ds.get(rule.key, NOT_GIVEN),
                origin=slots_origin if on_slots else facts.ds.origin(rule.key),
                message=rule.message.format_map(_ByName(facts)),
                fix=rule.fix.format_map(_ByName(facts)),
                code=rule.code,
            )
            yield rule, problem


class _ByName(dict[str, Any]):
    """The facts by their names, for ``str.format_map``."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        return getattr(self._facts, name)
