"""What ranks that share the experts of a model (DeepSpeed's AutoEP) cannot do."""

from __future__ import annotations

from determined_ds.config.autoep import DEGREE, ENABLED, NAME
from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

SIZE = ("hyperparameters", NAME)
MOE_SETTINGS = "deepspeed 0.19.8 runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer._configure_moe_settings"
OWN = "trial/expert_parallel.py marks which experts a rank holds, for a model that is cut in no other way"

RULES: tuple[Rule, ...] = (
    Rule(
        code="expert-degree",
        key=SIZE,
        breaks=lambda f: isinstance(size := f.hyperparameters.get((NAME,)), int) and size != f.experts,
        message="differs from expert_parallel of the DeepSpeed JSON, which is {experts} (0: not enabled)",
        fix="keep one of them",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_expert_parallel",
    ),
    Rule(
        code="expert-replicas",
        key=DEGREE,
        breaks=lambda f: (
            f.experts > 1
            and f.topology.data_parallel_world_size % f.experts != 0
            and f.topology.data_parallel_world_size == f.slots
        ),
        message="{topology.data_parallel_world_size} replicas cannot be divided into groups of {experts}",
        fix="use an expert_parallel_size that divides the replicas",
        source="deepspeed 0.19.8 utils/groups.py _create_expert_and_data_parallel",
    ),
    *(
        Rule(
            code=code,
            key=DEGREE,
            breaks=lambda f, degree=degree: (  # type: ignore[misc]
                f.experts > 0 and getattr(f.topology, degree) > 1
            ),
            message=f"is not carried out with {degree} {{topology.{degree}}}",
            fix=f"remove expert_parallel_size, or set {degree} to 1",
            source=OWN,
        )
        for code, degree in (
            ("expert-pipeline", "pipe_parallel_size"),
            ("expert-model", "model_parallel_size"),
            ("expert-sequence", "sequence_parallel_size"),
        )
    ),
    Rule(
        code="expert-precision",
        key=(ZERO, "stage"),
        breaks=lambda f: f.experts > 0 and f.zero_stage == 0 and f.strategy.precision != "fp32",
        message="without ZeRO, the norm by which gradients of {strategy.precision} are clipped leaves out those of the"
        " experts",
        fix="set zero_optimization.stage to 1, 2 or 3",
        source="deepspeed 0.19.8 runtime/fp16/unfused_optimizer.py FP16_UnfusedOptimizer.step",
    ),
    Rule(
        code="expert-zeropp",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.experts > 0 and f.strategy.zeropp,
        message="ZeRO++ makes its groups of all ranks, and these hold different experts",
        fix="remove zero_hpz_partition_size and the zero_quantized_ keys, or expert_parallel_size",
        source="deepspeed 0.19.8 utils/groups.py _create_zero_param_parallel_group",
    ),
    Rule(
        code="expert-reduce-scatter",
        key=(ZERO, "reduce_scatter"),
        breaks=lambda f: (
            f.experts > 0
            and f.zero_stage in (1, 2)
            and f.zero("reduce_scatter") is False
            and not f.uses_bf16_optimizer
        ),
        message="gradients of experts would be summed over ranks that hold other experts, and DeepSpeed refuses it",
        fix="remove reduce_scatter",
        source=MOE_SETTINGS,
    ),
    Rule(
        code="expert-contiguous",
        key=(ZERO, "contiguous_gradients"),
        breaks=lambda f: f.experts > 0 and f.zero_stage == 2 and f.zero("contiguous_gradients") is False,
        message="ZeRO 2 takes gradients of experts from its contiguous buffers only",
        fix="remove contiguous_gradients",
        source=MOE_SETTINGS,
    ),
    Rule(
        code="expert-kernels",
        key=ENABLED,
        breaks=lambda f: f.experts > 0 and f.strategy.torch_compile,
        message="torch's compiler was not tried on the experts' layer, whose sizes change in every step",
        fix="set hyperparameters.torch_compile to false",
        source="deepspeed 0.19.8 module_inject/auto_ep_layer.py AutoEPMoELayer",
        warning=True,
    ),
)
