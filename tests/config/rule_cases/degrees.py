"""What a pipeline cannot do, and degrees that do not fit the ranks: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import FEW, FP16, ZERO, Cases, Setup, zero

DUALPIPEV, INTERLEAVED, ZB_H1 = ({"pipe_schedule": name} for name in ("dualpipev", "interleaved", "zb-h1"))

BY_TIME = {"partition_method": "measured"}

CASES: Cases = {
    ("pipe-within-machine", ("hyperparameters", "pipe_within_machine")): (
        Setup(hyperparameters={"pipe_within_machine": True}),
        Setup(hyperparameters={"pipe_within_machine": True, "pipe_schedule": "1f1b"}, pipe=2),
    ),
    ("pipeline-zero-stage", (ZERO, "stage")): (Setup(ds=zero(2), pipe=2), Setup(ds=zero(1), pipe=2)),
    ("pipeline-fp16-stage", ("fp16", "enabled")): (
        Setup(ds=FP16, pipe=2),
        Setup(ds={**FP16, **zero(1)}, pipe=2),
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
    ("pipeline-unheeded", ("flops_profiler", "enabled")): (
        Setup(ds={"flops_profiler": {"enabled": True}}, pipe=2),
        Setup(ds={"flops_profiler": {"enabled": True}}),
    ),
    ("pipeline-unheeded", ("hybrid_engine", "enabled")): (
        Setup(ds={"hybrid_engine": {"enabled": True}}, pipe=2),
        Setup(ds={"hybrid_engine": {"enabled": True}}),
    ),
    ("pipe-schedule", ("gradient_accumulation_steps",)): (
        Setup(ds={"gradient_accumulation_steps": 3}, pipe=2, hyperparameters=DUALPIPEV),
        Setup(ds={"gradient_accumulation_steps": 4}, pipe=2, hyperparameters=DUALPIPEV),
    ),
    **{
        ("pipe-schedule-partitioned", ("pipeline", key)): (
            Setup(
                ds={"gradient_accumulation_steps": 4, "pipeline": {key: True}},
                pipe=2,
                hyperparameters=INTERLEAVED,
            ),
            Setup(ds={"gradient_accumulation_steps": 4, "pipeline": {key: True}}, pipe=2),
        )
        for key in ("pipe_partitioned", "grad_partitioned")
    },
    ("partition-one-stage", ("hyperparameters", "partition_method")): (
        Setup(hyperparameters=BY_TIME),
        Setup(pipe=2, hyperparameters=BY_TIME),
    ),
    ("partition-measured", ("hyperparameters", "partition_method")): (
        Setup(slots=4, pipe=2, model=2, hyperparameters=BY_TIME),
        Setup(slots=4, pipe=2, model=2, hyperparameters={"partition_method": "parameters"}),
    ),
    ("zb-h1-recomputation", ("hyperparameters", "pipe_schedule")): (
        Setup(
            ds={"gradient_accumulation_steps": 2, "pipeline": {"activation_checkpoint_interval": 1}},
            pipe=2,
            hyperparameters=ZB_H1,
        ),
        Setup(
            ds={"gradient_accumulation_steps": 4, "pipeline": {"activation_checkpoint_interval": 1}},
            pipe=2,
            hyperparameters=INTERLEAVED,
        ),
    ),
    ("zb-h1-compiled", ("hyperparameters", "pipe_schedule")): (
        Setup(
            ds={"gradient_accumulation_steps": 2}, pipe=2, hyperparameters={**ZB_H1, "torch_compile": True}
        ),
        Setup(ds={"gradient_accumulation_steps": 2}, pipe=2, hyperparameters=ZB_H1),
    ),
    ("pipe-schedule-one-stage", ("hyperparameters", "pipe_schedule")): (
        Setup(hyperparameters=INTERLEAVED),
        Setup(ds={"gradient_accumulation_steps": 4}, pipe=2, hyperparameters=INTERLEAVED),
    ),
}
