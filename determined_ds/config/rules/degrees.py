"""What a pipeline cannot do, and degrees that do not fit the ranks."""

from __future__ import annotations

from determined_ds.config.facts import ZERO
from determined_ds.config.rules.rule import Rule
from determined_ds.pipe.orders import ONE_F_ONE_B, ZB_H1
from determined_ds.pipe.partition import MEASURED

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
        code="pipeline-fp16-stage",
        key=("fp16", "enabled"),
        breaks=lambda f: f.pipe > 1 and f.enabled("fp16") and f.zero_stage == 0,
        message="without ZeRO a pipeline does not scale its fp16 loss, and divides the gradients by the scale",
        fix="set zero_optimization.stage to 1, or pipe_parallel_size to 1, or use bf16",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine.backward; runtime/fp16/unfused_optimizer.py",
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
        code="pipe-schedule",
        key=("gradient_accumulation_steps",),
        breaks=lambda f: f.pipe > 1 and bool(f.schedule_problem),
        message="{schedule_problem}, with pipe_parallel_size {pipe}",
        fix="change micro_batch_size or global_batch_size, or take pipe_schedule: 1f1b",
        source="deepspeed 0.19.8 runtime/pipe/schedule.py DualPipeVSchedule; arXiv 2104.04473, section 2.2",
    ),
    *(
        Rule(
            code="pipe-schedule-partitioned",
            key=("pipeline", key),
            breaks=lambda f, key=key: (  # type: ignore[misc]
                f.pipe > 1 and f.schedule != ONE_F_ONE_B and bool(f.ds.get(("pipeline", key)))
            ),
            message="{schedule} sends whole activations and gradients",
            fix="remove it, or take pipe_schedule: 1f1b",
            source="deepspeed 0.19.8 runtime/pipe/dualpipev.py DualPipeVEngine.__init__; trial/ordered_engine.py",
        )
        for key in ("pipe_partitioned", "grad_partitioned")
    ),
    Rule(
        code="pipe-within-machine",
        key=("hyperparameters", "pipe_within_machine"),
        breaks=lambda f: f.topology.pipe_within_machine and f.pipe == 1,
        message="has no effect: there is one stage",
        fix="set pipe_parallel_size to 2 or more, or remove it",
        source="config/topology.py Topology.axes",
        warning=True,
    ),
    Rule(
        code="zb-h1-recomputation",
        key=("hyperparameters", "pipe_schedule"),
        breaks=lambda f: f.pipe > 1 and f.schedule == ZB_H1 and f.strategy.activation_checkpointing,
        message="zb-h1 cannot train with activation checkpointing: its backward pass goes through a layer twice, and"
        " would compute it anew each time",
        fix="take another pipe_schedule, or no activation checkpointing",
        source="deepspeed 0.19.8 runtime/activation_checkpointing/checkpointing.py CheckpointFunction.backward, which"
        " raises: not compatible with .grad()",
    ),
    Rule(
        code="zb-h1-compiled",
        key=("hyperparameters", "pipe_schedule"),
        breaks=lambda f: f.pipe > 1 and f.schedule == ZB_H1 and f.strategy.is_compiled,
        message="zb-h1 gains nothing from compiled layers: the backward pass of one has no parts, and would run twice",
        fix="take another pipe_schedule, or torch_compile: false",
        source="torch 2.13 distributed/pipelining/schedules.py _check_torch_compile_compatibility",
    ),
    Rule(
        code="pipe-schedule-one-stage",
        key=("hyperparameters", "pipe_schedule"),
        breaks=lambda f: f.pipe == 1 and f.schedule != ONE_F_ONE_B,
        message="has no effect: there is one stage",
        fix="set pipe_parallel_size to 2 or more, or remove pipe_schedule",
        source="all passes of one rank run one after the other, whatever their order",
        warning=True,
    ),
    Rule(
        code="partition-one-stage",
        key=("hyperparameters", "partition_method"),
        breaks=lambda f: f.pipe == 1 and f.partition_method is not None,
        message="partition_method {partition_method} has no effect: there is one stage",
        fix="set pipe_parallel_size to 2 or more, or remove partition_method",
        source="a model that is not divided needs no partition",
        warning=True,
    ),
    Rule(
        code="partition-measured",
        key=("hyperparameters", "partition_method"),
        breaks=lambda f: f.pipe > 1 and f.partition_method == MEASURED and f.topology.model_parallel_size > 1,
        message="one rank measures a layer, and with model_parallel_size {topology.model_parallel_size} several"
        " compute it together",
        fix="use parameters, uniform or type:REGEX",
        source="trial/layer_times.py measured_layers",
    ),
    Rule(
        code="pipeline-bubble",
        key=("gradient_accumulation_steps",),
        breaks=lambda f: f.pipe > 1 and f.micro_batches < f.pipe and not f.schedule_problem,
        message="{micro_batches} micro-batches for {pipe} pipeline stages: by {schedule} a stage waits {bubble} of the"
        " time",
        fix="use at least {pipe} micro-batches (4 x {pipe} leave a bubble of {full_bubble})",
        source="pipe/timeline.py counted_bubble, by arXiv 1811.06965, 2104.04473 and 2401.10241",
        warning=True,
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
)
