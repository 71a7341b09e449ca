"""What ranks that share a sequence (Ulysses) cannot do."""

from __future__ import annotations

from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule

DEGREE = ("hyperparameters", "sequence_parallel_size")
IN_JSON = ("sequence_parallel_size",)

RULES: tuple[Rule, ...] = (
    Rule(
        code="sequence-pipeline",
        key=DEGREE,
        breaks=lambda f: f.sequence > 1 and f.pipe > 1,
        message="a pipeline's engine takes no groups of ranks that share a sequence",
        fix="set sequence_parallel_size or pipe_parallel_size to 1",
        source="deepspeed 0.19.8 __init__.py initialize: 'mpu must be None with pipeline parallelism';"
        " runtime/pipe/topology.py has no axis of sequences",
    ),
    Rule(
        code="sequence-model",
        key=DEGREE,
        breaks=lambda f: f.sequence > 1 and f.topology.model_parallel_size > 1,
        message="DeepSpeed's groups of sequences are made of all ranks: they cannot share layers as well",
        fix="set sequence_parallel_size or model_parallel_size to 1",
        source="deepspeed 0.19.8 runtime/sequence_parallel/parallel_state_sp.py initialize_sequence_parallel,"
        " whose model-parallel group is the sequence's; utils/groups.py _init_tp_mesh_device",
    ),
    Rule(
        code="sequence-degree",
        key=IN_JSON,
        breaks=lambda f: (f.ds.get(IN_JSON) or 1) not in (1, f.sequence),
        message="DeepSpeed would count replicas by it, and hyperparameters.sequence_parallel_size is {sequence}",
        fix="write hyperparameters.sequence_parallel_size, and remove it from the JSON",
        source="deepspeed 0.19.8 __init__.py initialize; runtime/config.py DeepSpeedConfig.__init__",
    ),
    Rule(
        code="sequence-mesh",
        key=("data_parallel_size",),
        breaks=lambda f: f.sequence > 1 and f.ds.get(("data_parallel_size",)) is not None,
        message="beside sequence_parallel_size it makes DeepSpeed build a second set of groups",
        fix="remove data_parallel_size: replicas follow from the slots",
        source="deepspeed 0.19.8 __init__.py initialize, initialize_mesh_device",
    ),
    Rule(
        code="sequence-length",
        key=("hyperparameters", "sequence_length"),
        breaks=lambda f: f.sequence > 1 and f.sequence_length % f.sequence != 0,
        message="cannot be cut into {sequence} slices of one length (sequence_parallel_size)",
        fix="use a sequence_length that {sequence} divides",
        source="deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter.refill",
    ),
    Rule(
        code="sequence-hpz",
        key=(ZERO, "zero_hpz_partition_size"),
        breaks=lambda f: f.sequence > 1 and f.strategy.zeropp,
        message="ZeRO++ averages over its own groups of all ranks, and does not count those that share a sequence",
        fix="remove zero_hpz_partition_size and the zero_quantized_ keys, or set sequence_parallel_size to 1",
        source="deepspeed 0.19.8 runtime/comm/coalesced_collectives.py all_to_all_quant_reduce divides by its own"
        " group; utils/groups.py _create_zero_param_parallel_group",
    ),
    Rule(
        code="sequence-deepcompile",
        key=("compile", "deepcompile"),
        breaks=lambda f: f.sequence > 1 and f.strategy.deepcompile,
        message="DeepCompile shards sequences by passes of its own, and would shard the slices again",
        fix="set compile.deepcompile to false",
        source="deepspeed 0.19.8 compile/passes/sp_compile.py, compile/custom_ops/sp_dp_registry.py",
    ),
)
