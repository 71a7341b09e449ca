"""What ranks that share a layer (tensor parallel by DeepSpeed's AutoTP) cannot do."""

from __future__ import annotations

from determined_ds.config.autotp import DEGREE, HEAD, stated_degree
from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

TP_SIZE = ("tensor_parallel", "tp", "tp_size")

RULES: tuple[Rule, ...] = (
    Rule(
        code="model-parallel-degree",
        key=DEGREE,
        breaks=lambda f: (stated_degree(f.ds) or 1) not in (1, f.topology.model_parallel_size),
        message="differs from hyperparameters.model_parallel_size = {topology.model_parallel_size}: ranks would share a"
        " replica that this counts as several, each with its own data",
        fix='set hyperparameters.model_parallel_size to the same, or write "auto" here',
        source="deepspeed 0.19.8 __init__.py initialize; runtime/config.py DeepSpeedConfig.__init__",
    ),
    Rule(
        code="tensor-tp-size",
        key=TP_SIZE,
        breaks=lambda f: f.autotp > 1 and f.ds.get(TP_SIZE) not in (None, 1, f.autotp),
        message="differs from tensor_parallel.autotp_size = {autotp}",
        fix="remove it",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._apply_autotp_partitioning",
    ),
    Rule(
        code="tensor-pipeline",
        key=DEGREE,
        breaks=lambda f: f.autotp > 1 and f.pipe > 1,
        message="AutoTP replaces the groups of a pipeline by its own, of neighbouring ranks whatever their stage:"
        " the stages then wait for each other for ever",
        fix="set pipe_parallel_size to 1; or remove it, and build layers that cut themselves",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_tensor_parallel_states; measured with"
        " two stages of two ranks",
    ),
    Rule(
        code="tensor-zeropp",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.autotp > 1 and f.strategy.zeropp,
        message="ZeRO++ makes its groups of all ranks, and those of one replica hold different parts of a layer",
        fix="remove zero_hpz_partition_size and the zero_quantized_ keys, or set model_parallel_size to 1",
        source="deepspeed 0.19.8 utils/groups.py _create_zero_param_parallel_group",
    ),
    Rule(
        code="tensor-head",
        key=HEAD,
        breaks=lambda f: f.autotp > 1 and f.ds.get(HEAD) is True,
        message="the model returns each rank its own part of the logits: a loss of the trial's own from them is wrong",
        fix="remove it, unless the trial takes the loss that the model computes (model(..., labels=...).loss)",
        source="deepspeed 0.19.8 sequence/cross_entropy.py configure_vocab_parallel_loss",
        warning=True,
    ),
)
