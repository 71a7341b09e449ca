"""The strategies that have a name: one list for ``generate``, ``estimate``, ``compare`` and ``autotune``."""

from __future__ import annotations

from dataclasses import dataclass

from determined_ds.pipe.orders import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a named strategy sets in an experiment; everything else stays.

    Args:
        zero_stage: 0 to 3.
        offload_optimizer: Optimizer states are kept in host memory; from ZeRO 1 on.
        offload_param: Parameters are, too; ZeRO 3.
        has_stages: It is a pipeline.
        pipe_schedule: Of the pipeline; None leaves the experiment's.
        zeropp: ZeRO++; ZeRO 3.
        engine: ``deepspeed``, or ``ddp`` for torch's own DistributedDataParallel.
        on_one_slot: It is measured on one slot, whatever the experiment has.
    """

    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    has_stages: bool = False
    pipe_schedule: str | None = None
    zeropp: bool = False
    engine: str = "deepspeed"
    on_one_slot: bool = False


# What fits almost any model: pipelines, then the fastest first, which is the one that needs most memory.
PLAIN = {
    "pipeline": Form(has_stages=True),
    "pipeline_zero1": Form(has_stages=True, zero_stage=1),
    "zero0": Form(),
    "zero1": Form(zero_stage=1),
    "zero2": Form(zero_stage=2),
    "zero3": Form(zero_stage=3),
    "zero1_offload": Form(zero_stage=1, offload_optimizer=True),
    "zero2_offload": Form(zero_stage=2, offload_optimizer=True),
    "zero3_offload_optimizer": Form(zero_stage=3, offload_optimizer=True),
    "zero3_offload": Form(zero_stage=3, offload_optimizer=True, offload_param=True),
}
# The experiment's own pipeline in another order; one of as many stages as slots, where it has none.
ORDERS = {schedule: Form(has_stages=True, pipe_schedule=schedule) for schedule in SCHEDULES}
FORMS = {
    **PLAIN,
    **ORDERS,
    "zeropp": Form(zero_stage=3, zeropp=True),
    "ddp": Form(engine="ddp"),
    "single_gpu_simple": Form(on_one_slot=True),
    "single_gpu_offload": Form(zero_stage=2, offload_optimizer=True, on_one_slot=True),
}


def plain_forms(*, has_stages: bool) -> list[Form]:
    """Those of :data:`PLAIN` that are pipelines, or that are not."""
    return [form for form in PLAIN.values() if form.has_stages == has_stages]
