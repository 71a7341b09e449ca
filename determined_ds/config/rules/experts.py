"""What ranks that share the experts of a model (DeepSpeed's AutoEP) cannot do."""

from __future__ import annotations

from determined_ds.config.autoep import DEGREE, ENABLED, NAME
from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

SIZE = ("hyperparameters", NAME)
OWN = "trial/expert_parallel.py marks which experts a rank holds, for a model that is cut in no other way"

RULES: tuple[Rule, ...] = (
    Rule(
        code="expert-degree",
        key=SIZE,
        breaks=lambda f: f.hyperparameters.get((NAME,)) not in (None, "auto", f.experts),
        message="differs from expert_parallel of the DeepSpeed JSON, which is {experts} (0: not enabled)",
        fix="keep one of them",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_expert_parallel",
    ),
    Rule(
        code="expert-replicas",
        key=DEGREE,
        breaks=lambda f: f.experts > 1 and f.topology.data_parallel_world_size % f.experts != 0,
        message="{topology.data_parallel_world_size} replicas cannot be divided into groups of {experts}",
        fix="use an expert_parallel_size that divides the replicas",
        source="deepspeed 0.19.8 utils/groups.py _create_expert_and_data_parallel",
    ),
    *(
        Rule(
            code=code,
            key=DEGREE,
            breaks=breaks,
            message=message,
            fix="set one of both to 1",
            source=OWN,
        )
        for code, breaks, message in (
            (
                "expert-pipeline",
                lambda f: f.experts > 0 and f.pipe > 1,
                "is not carried out in pipeline stages",
            ),
            (
                "expert-model",
                lambda f: f.experts > 0 and f.topology.model_parallel_size > 1,
                "is not carried out with model_parallel_size {topology.model_parallel_size}",
            ),
            (
                "expert-sequence",
                lambda f: f.experts > 0 and f.sequence > 1,
                "is not carried out with sequence_parallel_size {sequence}",
            ),
        )
    ),
    Rule(
        code="expert-precision",
        key=(ZERO, "stage"),
        breaks=lambda f: f.experts > 1 and f.zero_stage == 0 and f.strategy.precision != "fp32",
        message="without ZeRO, gradients of {strategy.precision} are clipped by the mean of the ranks' norms,"
        " each of other experts",
        fix="set zero_optimization.stage to 1, 2 or 3",
        source="deepspeed 0.19.8 runtime/utils.py get_norm_with_moe_layers",
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
        code="expert-kernels",
        key=ENABLED,
        breaks=lambda f: f.experts > 0 and f.strategy.torch_compile,
        message="torch's compiler was not tried on the experts' layer, whose sizes change in every step",
        fix="set hyperparameters.torch_compile to false",
        source="deepspeed 0.19.8 module_inject/auto_ep_layer.py AutoEPMoELayer",
        warning=True,
    ),
)
