"""What ranks that share the experts of a model (DeepSpeed's AutoEP) cannot do."""

from __future__ import annotations

from determined_ds.config.autoep import DEGREE, NAME
from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

NON_MOE = ("compile", "autoep_non_moe")
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
        breaks=lambda f: (
            f.experts > 0
            and f.zero_stage in (1, 2)
            and f.zero("contiguous_gradients") is False
            and not f.uses_bf16_optimizer
        ),
        message="gradients of experts come out wrong under ZeRO 1, and DeepSpeed refuses ZeRO 2",
        fix="remove contiguous_gradients",
        source=f"{MOE_SETTINGS}; ZeRO 1 measured on four ranks, losses 0.0025 off after six steps",
    ),
    Rule(
        code="expert-compiler",
        key=NON_MOE,
        breaks=lambda f: f.experts > 0 and f.strategy.torch_compile and f.ds.get(NON_MOE) is not True,
        message="torch's compiler refuses grouped products of fp32, by which experts are computed",
        fix="set it to true: all but the layers of experts is compiled; or hyperparameters.torch_compile to false",
        source="torch 2.13 _meta_registrations.py _meta_grouped_mm_common; measured on two CPU ranks",
    ),
    Rule(
        code="expert-compiler-zero",
        key=NON_MOE,
        breaks=lambda f: (
            f.experts > 0
            and f.strategy.torch_compile
            and f.ds.get(NON_MOE) is True
            and (f.zero_stage == 3 or bool(f.strategy.offload_optimizer))
        ),
        message="DeepSpeed compiles around the layers of experts under ZeRO 0 to 2 without offloading",
        fix="set hyperparameters.torch_compile to false",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine.compile",
    ),
    Rule(
        code="expert-deepcompile",
        key=("compile", "deepcompile"),
        breaks=lambda f: f.experts > 0 and f.strategy.deepcompile,
        message="DeepCompile takes the model as one graph, and the layers of experts exchange tokens in sizes that"
        " differ in each step",
        fix="set compile.deepcompile to false",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine.compile, which excludes it around experts",
    ),
    *(
        Rule(
            code=f"expert-{option.replace('_', '-')}",
            key=("expert_parallel", option),
            breaks=lambda f, option=option, value=value: (  # type: ignore[misc]
                f.experts > 0
                and f.accelerator.name == "cpu"
                and f.ds.get(("expert_parallel", option)) == value
            ),
            message="runs on CUDA alone",
            fix="remove it",
            source=f"deepspeed 0.19.8 {where}",
        )
        for option, value, where in (
            ("comm_backend", "deepep", "module_inject/auto_ep_comm.py"),
            (
                "async_split_plan",
                True,
                "module_inject/auto_ep_layer.py _start_async_split_plan_from_expert_counts",
            ),
            (
                "combine_impl",
                "fused_weighted_sum",
                "ops/triton_ops/autoep_fused_token_ops.py assert_supported",
            ),
        )
    ),
    Rule(
        code="expert-tensor-parallel",
        key=("expert_parallel", "expert_tensor_parallel_size"),
        breaks=lambda f: (
            f.experts > 0 and f.ds.get(("expert_parallel", "expert_tensor_parallel_size")) not in (None, 1)
        ),
        message="DeepSpeed does not cut single experts",
        fix="remove it",
        source="deepspeed 0.19.8 module_inject/auto_ep_folding.py validate_folding_global",
    ),
)
